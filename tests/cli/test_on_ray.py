"""What `pdserve up --on ray` makes of its flags."""

import stat
from pathlib import Path

import pytest

from pdserve.autoscaler.actuator import PoolSizes, sizes_at_start
from pdserve.autoscaler.schema import RayActuator, load
from pdserve.base.errors import ConfigError
from pdserve.cli.cluster import Platform, check_platform, policy_on_ray


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_without_a_policy_both_pools_keep_their_sizes() -> None:
    path = policy_on_ray(None, "c", 3, None, "head:6379", {"device": "cuda"})
    policy = load(path)
    assert sizes_at_start(path) == PoolSizes(3, 1, max_workers=4, elsewhere=True)
    assert (policy.pools.prefill.max_replicas, policy.pools.decode.max_replicas) == (3, 1)
    assert isinstance(policy.actuator, RayActuator)
    assert (policy.actuator.address, policy.actuator.resources_per_device) == ("head:6379", {"GPU": 1.0})
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_worker_on_a_cpu_takes_as_many_as_it_has_threads() -> None:
    actuator = load(policy_on_ray(None, "c", 1, 1, None, {"num_threads": 6})).actuator
    assert isinstance(actuator, RayActuator)
    assert actuator.resources_per_device == {"CPU": 6.0}


@pytest.mark.parametrize(("flag", "flags"), [("--prefill", (2, None, None)), ("--address", (None, None, "head:6379"))])
def test_a_flag_beside_the_policy_that_says_the_same_is_refused(
    flag: str, flags: tuple[int | None, int | None, str | None]
) -> None:
    with pytest.raises(ConfigError, match=flag):
        policy_on_ray(Path("policy.yaml"), "c", *flags, {})


@pytest.mark.parametrize(
    ("flag", "on", "elsewhere", "num_mixed", "address"),
    [
        ("--on: processes", Platform.PROCESSES, True, 0, None),
        ("--on: ray", Platform.RAY, False, 0, None),
        ("--mixed", Platform.RAY, True, 1, None),
        ("--address", Platform.PROCESSES, False, 0, "head:6379"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flag: str, on: Platform, elsewhere: bool, num_mixed: int, address: str | None
) -> None:
    with pytest.raises(ConfigError, match=flag):
        check_platform(on, PoolSizes(1, 1, None, elsewhere), num_mixed, address)
