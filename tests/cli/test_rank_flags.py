"""`pdserve up --prefill-tp`, `--decode-pp` and so on: ranks and pipeline stages of the workers of a role."""

from dataclasses import replace

import pytest

from pdserve.base.errors import ConfigError
from pdserve.base.roles import Role
from pdserve.cli.cluster import Platform, RankFlags
from pdserve.launch.plan import ClusterSpec


def test_each_flag_sets_its_role_in_place_of_what_a_file_says() -> None:
    of_file = {"prefill": {"tensor_parallel_size": 4, "page_size": 32}, "decode": {"page_size": 32}}
    found = RankFlags(prefill_tp=1, prefill_pp=3, decode_tp=2).over(of_file, {}, Platform.PROCESSES)
    assert found == {
        "prefill": {"tensor_parallel_size": 1, "pipeline_parallel_size": 3, "page_size": 32},
        "decode": {"tensor_parallel_size": 2, "page_size": 32},
        "mixed": {},
    }


@pytest.mark.parametrize(
    ("flags", "of_all", "on", "name"),
    [
        (RankFlags(decode_pp=2), {"pipeline_parallel_size": 2}, Platform.PROCESSES, "--decode-pp"),
        (RankFlags(prefill_tp=2), {"tensor_parallel_size": 2}, Platform.PROCESSES, "--prefill-tp"),
        (RankFlags(prefill_pp=2), {}, Platform.RAY, "--prefill-pp"),
    ],
)
def test_flags_of_a_role_are_refused_beside_those_of_all_workers_and_on_ray(
    flags: RankFlags, of_all: dict[str, object], on: Platform, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: goes neither with"):
        flags.over({}, of_all, on)


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ({"device": "cuda"}, "own"),
        ({"device": "interpreter"}, "own"),
        ({"device": "cuda", "rank_memory": "shared"}, "shared"),
        ({"device": "cpu"}, None),
    ],
)
def test_workers_of_one_gpu_keep_pages_as_those_of_several_do(flags: dict[str, object], memory: str | None) -> None:
    several = ClusterSpec("m", "m", worker_flags=flags, role_flags={Role.DECODE: {"tensor_parallel_size": 2}})
    assert [several.flags_of(role).get("rank_memory") for role in (Role.PREFILL, Role.DECODE)] == [memory, memory]
    assert ClusterSpec("m", "m", worker_flags=flags).flags_of(Role.PREFILL) == flags
    none_of_them = replace(several, role_flags={Role.MIXED: {"tensor_parallel_size": 2}})
    assert none_of_them.flags_of(Role.PREFILL) == flags, "there are no mixed workers"
