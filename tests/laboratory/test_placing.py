"""A router's core that is measured places and ends every request."""

from lab.placing import measure_policies, measure_steps
from pdserve.router.placement.policies import POLICIES


def test_the_router_benchmark_places_and_ends_every_request() -> None:
    found = measure_policies(40, 40, 60, 300)
    assert {each.name for each in found} == set(POLICIES)
    for each in found:
        assert each.placements_per_s > 0
        assert each.rest_s > 0


def test_the_core_ends_what_it_was_measured_with() -> None:
    found = measure_steps(num_sequences=4, num_steps=3)
    assert found.core_s > 0
    assert found.wire_s > 0
