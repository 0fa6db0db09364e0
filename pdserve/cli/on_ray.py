"""Flags of `pdserve up` for workers that are actors of Ray."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.autoscaler.process import PoolSizes


class Platform(StrEnum):
    PROCESSES = "processes"
    RAY = "ray"


def check_platform(on: Platform, sizes: "PoolSizes", num_mixed: int, address: str | None) -> None:
    """Raise ConfigError where flags and policy disagree about what runs the workers."""
    if sizes.elsewhere != (on is Platform.RAY):
        raise ConfigError(f"--on: {on} is not the policy's actuator.kind")
    if on is Platform.RAY and num_mixed:
        raise ConfigError("--mixed: goes with --on processes only")
    if on is not Platform.RAY and address is not None:
        raise ConfigError("--address: goes with --on ray only")


def policy_on_ray(
    policy: Path | None,
    name: str,
    prefill: int | None,
    decode: int | None,
    address: str | None,
    flags: Mapping[str, object],
) -> Path:
    """Return the policy to follow: the one given, or one that is written into the cluster's folder and keeps sizes.

    ConfigError where a flag would say what the given policy says.
    """
    if policy is None:
        return _fixed_policy(name, prefill or 1, decode or 1, address, flags)
    for flag, value in (("prefill", prefill), ("decode", decode), ("address", address)):
        if value is not None:
            raise ConfigError(f"--{flag}: goes with no --policy on Ray: the policy says it")
    return policy


def _fixed_policy(
    name: str, num_prefill: int, num_decode: int, address: str | None, flags: Mapping[str, object]
) -> Path:
    from json import dumps

    from pdserve.files import write_atomically
    from pdserve.launch.folder import runtime_dir

    device = {"GPU": 1} if flags.get("device") == "cuda" else {"CPU": flags.get("num_threads") or 1}
    sizes = {"prefill": num_prefill, "decode": num_decode}
    policy = {
        "apiVersion": "pdserve/v1alpha1",
        "kind": "AutoscalingPolicy",
        "objectives": {"ttftMs": 60_000, "tpotMs": 60_000},
        "budget": {"maxDevices": num_prefill + num_decode},
        "interval": {"react": "1s"},
        "pools": {pool: {"minReplicas": size, "maxReplicas": size} for pool, size in sizes.items()},
        "roleSwitch": {"enabled": False},
        "actuator": {"kind": "ray", "address": address, "resourcesPerDevice": device},
    }
    path = runtime_dir(name) / "fixed-policy.json"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, dumps(policy, indent=2) + "\n")
    return path
