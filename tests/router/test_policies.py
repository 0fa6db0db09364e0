from typing import get_args

from pdserve.router.config import PolicyName
from pdserve.router.placement.policies import POLICIES


def test_each_policy_that_a_router_can_be_configured_with_exists() -> None:
    assert set(POLICIES) == set(get_args(PolicyName))
