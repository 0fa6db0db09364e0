"""Flags of the measuring commands: each is spelled once, and what cannot be is refused before anything starts."""

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from pdserve.base.errors import CommandError
from pdserve.cli.app import repeat_goodput
from pdserve.cli.results import only_cause

Command = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("command", ["accuracy", "overload"])
@pytest.mark.parametrize("flag", ["--load", "--seconds", "--calibration"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
def test_a_load_that_would_never_end_is_refused_before_a_cluster_starts(
    pdserve: Command, command: str, flag: str, value: str
) -> None:
    ended = pdserve("bench", command, "/no/such/model", flag, value)
    assert ended.returncode == 2
    assert f"Invalid value for '{flag}'" in ended.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--sessions", "0"), ("--turns", "1001"), ("--tool-tokens", "0"), ("--branches", "1"), ("--pause", "-1")],
)
def test_sessions_that_cannot_be_are_refused_by_their_flag(pdserve: Command, flag: str, value: str) -> None:
    ended = pdserve("bench", "agents", flag, value)
    assert ended.returncode == 2
    assert f"Invalid value for '{flag}'" in ended.stderr


def test_bench_load_sends_a_slice_by_its_name(pdserve: Command, address: str) -> None:
    flags = ("--scale", "0.001", "--request-rate", "2000", "--num-prompts", "150", "--endpoint", address)
    ended = pdserve("bench", "--workload", "azure-code", *flags, "--json", "-")
    assert ended.returncode == 0
    (run,) = json.loads(ended.stdout)["runs"]
    assert run["name"] == "azure-code, lengths x 0.001"
    assert run["num_requests"] == 150


@pytest.mark.parametrize("command", [("bench", "load", "1x2x3"), ("sim",)])
@pytest.mark.parametrize("rate", ["0", "-1", "inf", "nan"])
def test_a_rate_that_cannot_be_is_refused(pdserve: Command, command: tuple[str, ...], rate: str) -> None:
    ended = pdserve(*command, "--request-rate", rate)
    assert (ended.returncode, ended.stderr) == (2, f"pdserve: --request-rate: {rate} must be over 0 and finite\n")


def test_an_objective_is_written_as_for_vllm() -> None:
    command = ["bench", "--goodput", "ttft:250", "tpot:40", "4x5x6"]
    assert repeat_goodput(command) == ["bench", "--goodput", "ttft:250", "--goodput", "tpot:40", "4x5x6"]
    for other in (["--goodput", "ttft:250", "--endpoint", "h:1"], ["--endpoint", "h:1", "i:2"], ["--goodput"]):
        assert repeat_goodput(other) == other


@pytest.mark.parametrize(
    "goodput",
    [
        ("--goodput", "ttft:450", "tpot:10"),
        ("--goodput", "ttft:450", "--goodput", "tpot:10"),
        ("--goodput", "tpot:10 ttft:450"),
    ],
)
def test_objectives_that_are_given_apart_are_all_taken(
    pdserve: Command, address: str, goodput: tuple[str, ...]
) -> None:
    ended = pdserve("bench", "--workload", "2x3x4", *goodput, "--endpoint", address, "--json", "-")
    assert json.loads(ended.stdout)["objective"] == {"ttft_s": 0.45, "tpot_s": 0.01}


@pytest.mark.parametrize("command", [("bench", "load", "2x3x4"), ("bench", "overload", "/no/such/model"), ("sim",)])
def test_an_objective_that_is_given_twice_is_refused(pdserve: Command, command: tuple[str, ...]) -> None:
    ended = pdserve(*command, "--goodput", "ttft:450", "tpot:20", "--goodput", "tpot:10")
    assert (ended.returncode, ended.stderr) == (2, "pdserve: --goodput: tpot is given twice\n")


def test_what_a_command_says_while_its_other_tasks_run_is_still_one_line() -> None:
    told = CommandError("no request was seen")
    assert only_cause(ExceptionGroup("tasks", [ExceptionGroup("tasks", [told])])) is told
    both = ExceptionGroup("tasks", [told, OSError("disk")])
    assert only_cause(both) is both
