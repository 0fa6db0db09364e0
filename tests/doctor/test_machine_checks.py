"""Each check of a machine, over made-up facts; and all of them over this one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.doctor.gathering import read_rdma_ports, read_transports
from pdserve.doctor.machine import Level, Machine, RdmaPort, machine_findings

GIB = 1 << 30
WORKER = {"python": "3.11.7", "torch": "2.13.0", "safetensors": "0.8.0", "gguf": "0.19.0", "nixl_cu12": "1.5.1"}
ACTIVE = RdmaPort("mlx5_0:1", "ACTIVE", "400 Gb/sec (4X NDR)")
SOUND = Machine(
    versions=WORKER,
    cpu_info="model name\t: Fast CPU\nflags\t: avx2 avx512_bf16\n",
    num_cores=8,
    cpu_limit=None,
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
    locked_bytes=None,
    open_files=1 << 20,
    gpus=(),
    torch_gpus=(),
    torch_problem="",
    allocator_problem="",
    rdma_ports=(),
    transports=("tcp/lo", "cma/memory"),
    transports_problem="",
    is_clock_synchronized=True,
    kernels_problem="",
)


def levels(**changes: object) -> dict[str, Level]:
    """Return what the checks say of a sound machine with some other facts, where that is not ok."""
    found = machine_findings(replace(SOUND, **changes))  # type: ignore[arg-type]
    return {finding.name: finding.level for finding in found if finding.level is not Level.OK}


def seen(name: str, **changes: object) -> str:
    found = machine_findings(replace(SOUND, **changes))  # type: ignore[arg-type]
    return next(finding.seen for finding in found if finding.name == name)


def test_a_sound_machine_has_nothing_to_do() -> None:
    assert levels() == {}
    assert all(not finding.remedy for finding in machine_findings(SOUND))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": {"python": "3.11.7"}}, {}),  # a router's machine
        ({"versions": {"torch": "2.13.0"}}, {"packages": Level.WARNING}),
        ({"cpu_limit": 2.0}, {"cores": Level.WARNING}),
        ({"cpu_limit": 8.0}, {}),
        ({"memory_bytes": GIB}, {"memory": Level.WARNING}),
        ({"shm_bytes": 64 << 20}, {"/dev/shm": Level.WARNING}),
        ({"shm_bytes": None}, {"/dev/shm": Level.WARNING}),
        ({"open_files": 1024}, {"open files": Level.WARNING}),
        ({"open_files": None}, {}),
        ({"gpus": ("H100",), "torch_gpus": ("H100",)}, {}),
        ({"gpus": ("H100",), "torch_gpus": ("H100",), "allocator_problem": "it is bad"}, {"gpu": Level.FAILED}),
        ({"gpus": ("H100",), "torch_problem": "it is built for CPUs"}, {"gpu": Level.FAILED}),
        ({"gpus": ("H100",), "versions": {"python": "3.11.7"}}, {}),
        ({"is_clock_synchronized": False}, {"clock": Level.WARNING}),
        ({"is_clock_synchronized": None}, {}),
        ({"kernels_problem": "there is no C compiler: looked for gcc"}, {"cpu kernels": Level.WARNING}),
        ({"rdma_ports": (replace(ACTIVE, state="DOWN"),)}, {"rdma": Level.WARNING}),
        ({"rdma_ports": (ACTIVE,)}, {"ucx": Level.WARNING}),
        ({"rdma_ports": (ACTIVE,), "transports": ("rc_mlx5/mlx5_0:1",)}, {}),
        ({"transports": (), "transports_problem": "handoff_host: 10.0.0.9 is no address"}, {"ucx": Level.FAILED}),
        (
            {"rdma_ports": (ACTIVE,), "transports": ("rc_mlx5/mlx5_0:1",), "locked_bytes": 8 << 20},
            {"locked memory": Level.FAILED},
        ),
        ({"locked_bytes": 8 << 20}, {}),  # nothing is locked without RDMA
    ],
)
def test_each_lack_is_found(changes: dict[str, object], expected: dict[str, Level]) -> None:
    assert levels(**changes) == expected


def test_what_is_found_names_what_the_operator_would_set() -> None:
    assert "set num_threads: 2" in remedy_of("cores", cpu_limit=2.5)
    assert "mlx5_0:1" in seen("rdma", rdma_ports=(ACTIVE,))
    assert seen("processor") == (
        "Fast CPU: avx2 avx512_bf16; CPU workers compute in bfloat16: this processor has avx512_bf16"
    )


def remedy_of(name: str, **changes: object) -> str:
    found = machine_findings(replace(SOUND, **changes))  # type: ignore[arg-type]
    return next(finding.remedy for finding in found if finding.name == name)


def test_transports_are_read_from_ucxs_table() -> None:
    log = """
[1.1] [vm:1:0]   | Type       | Component | Transport | Device (System device)  |
[1.1] [vm:1:0]   | network    | tcp       | + tcp     | - eth0  + lo            |
[1.1] [vm:1:0]   |            | ib        | + rc_mlx5 | + mlx5_0:1 (0)          |
[1.1] [vm:1:0]   |            | ib        | - ud_mlx5 | + mlx5_0:1              |
"""
    assert read_transports(log) == ("tcp/lo", "rc_mlx5/mlx5_0:1")


def test_ports_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert read_rdma_ports(tmp_path) == (ACTIVE,)


@pytest.mark.slow
def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("model: /nowhere/at/all\n")
    command = [sys.executable, "-m", "pdserve", "doctor", "--json", "--name", "none-of-this-name", "--config", config]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {finding["name"]: finding for finding in json.loads(ended.stdout)}
    assert {"packages", "processor", "memory", "ucx", "cluster", "model"} <= found.keys()
    assert "tcp/lo" in found["ucx"]["seen"]
    assert (ended.returncode, found["model"]["level"]) == (1, "failed")
    assert "/nowhere/at/all" in found["model"]["seen"]
