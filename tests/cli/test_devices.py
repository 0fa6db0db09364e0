"""Workers of one machine get its GPUs one each while there are enough, and shares of one where there are not."""

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from supervised_children import Record, supervised

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import ConfigError
from pdserve.base.roles import Role
from pdserve.launch import devices as devices_module
from pdserve.launch.devices import VISIBLE, Devices, check_devices, deal, visible_devices
from pdserve.launch.plan import ChildSpec, ClusterSpec, ProcessRole
from pdserve.launch.supervisor import Backoff, Supervisor

CUDA = {"device": "cuda"}
PAIR = ClusterSpec("m", "m", worker_flags=CUDA)


def shares(spec: ClusterSpec) -> dict[str, object]:
    return {role.value: spec.flags_of(role).get("gpu_memory_utilization") for role in (Role.PREFILL, Role.DECODE)}


def dealt(monkeypatch: pytest.MonkeyPatch, visible: str, spec: ClusterSpec) -> tuple[Devices, ClusterSpec]:
    monkeypatch.setenv(VISIBLE, visible)
    devices, found = deal(spec)
    assert devices is not None
    return devices, found


@pytest.mark.parametrize(
    ("visible", "expected", "share"),
    [
        ("0", ["0", "0"], 0.45),
        ("0,1", ["0", "1"], None),
        ("3,5", ["3", "5"], None),
        ("GPU-8f,GPU-02", ["GPU-8f", "GPU-02"], None),
        ("7,6,5,4,3,2,1,0", ["7", "6"], None),
        ("2,-1,3", ["2", "2"], 0.45),
    ],
)
def test_a_pair_of_workers(monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str], share: float) -> None:
    devices, spec = dealt(monkeypatch, visible, PAIR)
    held = [devices.hold("prefill-0", "prefill"), devices.hold("decode-0", "decode")]
    assert [each[VISIBLE] for each in held] == expected
    assert shares(spec) == {"prefill": share, "decode": share}


def test_a_worker_that_comes_takes_the_gpu_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, spec = dealt(monkeypatch, "0,1,2", ClusterSpec("m", "m", worker_flags=CUDA, max_workers=3))
    names = ["prefill-0", "decode-0", "decode-1"]
    first = {name: devices.hold(name, "decode")[VISIBLE] for name in names}
    assert sorted(first.values()) == ["0", "1", "2"]
    devices.release("decode-0")
    assert devices.hold("decode-2", "decode")[VISIBLE] == first["decode-0"]
    assert devices.hold("decode-1", "decode")[VISIBLE] == first["decode-1"], "one that starts again keeps its own"
    assert shares(spec) == {"prefill": None, "decode": None}


def test_workers_that_may_come_later_have_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, spec = dealt(monkeypatch, "0,1", ClusterSpec("m", "m", worker_flags=CUDA, max_workers=6))
    held = Counter(devices.hold(f"decode-{number}", "decode")[VISIBLE] for number in range(6))
    assert held == {"0": 3, "1": 3}
    assert shares(spec) == {"prefill": 0.3, "decode": 0.3}


def test_only_workers_that_ask_for_a_gpu_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec("m", "m", role_flags={"decode": CUDA})
    devices, spec = dealt(monkeypatch, "0", spec)
    assert devices.hold("prefill-0", "prefill") == {}
    assert devices.hold("router", "router") == {}
    assert devices.hold("decode-0", "decode") == {VISIBLE: "0"}
    assert shares(spec) == {"prefill": None, "decode": None}
    monkeypatch.setenv(VISIBLE, "")
    assert deal(ClusterSpec("m", "m")) == (None, ClusterSpec("m", "m"))


def test_a_worker_of_ranks_holds_a_gpu_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    role_flags = {"prefill": {"tensor_parallel_size": 2}}
    devices, spec = dealt(monkeypatch, "0,1,2", ClusterSpec("m", "m", worker_flags=CUDA, role_flags=role_flags))
    held = [devices.hold("prefill-0", "prefill"), devices.hold("decode-0", "decode")]
    assert [each[VISIBLE] for each in held] == ["0,1", "2"]
    assert shares(spec) == {"prefill": None, "decode": None}
    devices, spec = dealt(monkeypatch, "5,3", ClusterSpec("m", "m", worker_flags=CUDA, role_flags=role_flags))
    assert [devices.hold("decode-0", "decode")[VISIBLE], devices.hold("prefill-0", "prefill")[VISIBLE]] == ["5", "5,3"]
    assert shares(spec) == {"prefill": 0.45, "decode": 0.45}


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0,1")
    flags = {**CUDA, "tensor_parallel_size": "4"}
    with pytest.raises(ConfigError, match="--tensor-parallel-size: 4 ranks need a GPU each, and 2 are visible here"):
        deal(ClusterSpec("m", "m", worker_flags=flags))


def test_replicas_elsewhere_hold_a_gpu_for_each_rank_of_their_worker() -> None:
    spec = ClusterSpec("m", "m", worker_flags={**CUDA, "tensor_parallel_size": 2})
    check_devices(spec, dict.fromkeys(Role, 2))
    check_devices(ClusterSpec("m", "m", worker_flags={"tensor_parallel_size": 2}), dict.fromkeys(Role, 1))
    with pytest.raises(ConfigError, match=r"decode\.devicesPerReplica: is 1, and a decode worker has 2 ranks"):
        check_devices(spec, {**dict.fromkeys(Role, 2), Role.DECODE: 1})


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
def test_a_machine_without_a_gpu_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    with pytest.raises(ConfigError, match="--device: cuda is asked for, and no CUDA device is visible here"):
        deal(PAIR)


def test_shares_that_do_not_fit_are_refused_with_the_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    flags = {**CUDA, "gpu_memory_utilization": 0.6}
    with pytest.raises(ConfigError, match=r"0\.6 is refused: 2 workers share each of 1 devices, so each may take 0\.5"):
        deal(ClusterSpec("m", "m", worker_flags=flags))
    flags["gpu_memory_utilization"] = 0.5
    _, spec = deal(ClusterSpec("m", "m", worker_flags=flags))
    assert shares(spec) == {"prefill": 0.5, "decode": 0.5}


def test_without_the_variable_torch_counts_them() -> None:
    assert visible_devices({}) == [], "torch is built for CPUs here"


def test_a_torch_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "COUNT_LIMIT_S", 1e-3)
    with pytest.raises(ConfigError, match="--device: torch does not say within"):
        visible_devices({})


@pytest.mark.slow
async def test_each_process_sees_its_own_gpu_also_after_a_restart(tmp_path: Path) -> None:
    def telling(name: str, role: ProcessRole) -> ChildSpec:
        os.mkfifo(tmp_path / name)
        told = f"open({str(tmp_path / name)!r}, 'w').write(os.environ.get({VISIBLE!r}, 'unset'))"
        return ChildSpec(name, role, (sys.executable, "-I", "-c", f"import os, signal; {told}; signal.pause()"))

    async def seen(name: str) -> str:
        return await asyncio.to_thread((tmp_path / name).read_text)

    children = [telling("router", "router"), telling("prefill-0", Role.PREFILL), telling("decode-0", Role.DECODE)]
    record, devices = Record(), Devices(["4", "6"], {"prefill": 1, "decode": 1})
    environment = {key: value for key, value in os.environ.items() if key != VISIBLE}
    backoff = Backoff(first_s=0.0, longest_s=0.0)
    supervisor = Supervisor(
        children, tmp_path, MonotonicClock(), environment=environment, backoff=backoff, devices=devices
    )
    async with supervised(supervisor, record):
        first = {name: await seen(name) for name in ("router", "prefill-0", "decode-0")}
        assert first["router"] == "unset"
        assert {first["prefill-0"], first["decode-0"]} == {"4", "6"}
        (decode,) = [each for each in supervisor.processes if each.name == "decode-0"]
        assert decode.pid is not None
        psutil.Process(decode.pid).kill()
        assert await seen("decode-0") == first["decode-0"]
