"""A workload says what is sent and when, the same each time for the same seed."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from pdserve.bench.workload import Arrival, parse, poisson, prompts, read_trace, stretched
from pdserve.errors import ConfigError


def test_numxinxout_sends_all_at_once() -> None:
    workload = parse("3x32x128")
    assert workload.name == "3x32x128"
    assert workload.arrivals == (Arrival(0.0, 32, 128),) * 3


@pytest.mark.parametrize("text", ["", "16x32", "0x1x1", "1x-2x3", "ax2x3", "1x2x3x4", "1.5x2x3"])
def test_what_is_not_numxinxout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--workload"):
        parse(text)


def test_poisson_arrivals_keep_the_requests_and_come_at_the_rate() -> None:
    workload = poisson(parse("4000x5x6"), rate_per_s=8.0, seed=1)
    starts = [arrival.start_s for arrival in workload.arrivals]
    gaps = [b - a for a, b in pairwise(starts)]
    assert starts == sorted(starts)
    assert {(a.prompt_len, a.output_len) for a in workload.arrivals} == {(5, 6)}
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # as wide as its mean: exponential


def test_equal_seeds_give_equal_workloads_and_prompts() -> None:
    first, again, other = (poisson(parse("20x9x4"), 2.0, seed) for seed in (7, 7, 8))
    assert first == again != other
    assert prompts(first.arrivals, 1000, 7) == prompts(again.arrivals, 1000, 7) != prompts(first.arrivals, 1000, 8)


def test_prompts_have_their_lengths_and_stay_in_the_vocabulary() -> None:
    arrivals = (Arrival(0, 1, 1), Arrival(0, 300, 1))
    drawn = prompts(arrivals, vocab_size=7, seed=0)
    assert [len(ids) for ids in drawn] == [1, 300]
    assert set(drawn[1]) == set(range(7))


def test_a_trace_is_sent_in_its_order_of_time_stretched_by_the_scale(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(
        '[{"start_time": 2, "prompt_len": 5, "output_len": 6}, {"start_time": 0.5, "prompt_len": 7, "output_len": 8}]'
    )
    assert read_trace(path, 2.0).arrivals == (Arrival(1.0, 7, 8), Arrival(4.0, 5, 6))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "no requests"),
        ("{}", "array"),
        ('[{"start_time": 0, "prompt_len": 0, "output_len": 1}]', "prompt_len"),
        ('[{"start_time": 0, "prompt_len": 1}]', "output_len"),
        ('[{"start_time": 0, "prompt_len": 1, "output_len": 1, "x": 1}]', "x"),
    ],
)
def test_a_broken_trace_is_refused_naming_the_field(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_trace(path, 1.0)


@pytest.mark.parametrize("factor", [-1.0, 0.0, float("nan"), float("inf")])
def test_neither_time_nor_a_rate_is_stretched_by_what_is_no_positive_number(factor: float) -> None:
    workload = parse("2x3x4")
    with pytest.raises(ConfigError, match="--scale"):
        stretched(workload, factor)
    with pytest.raises(ConfigError, match="--rate"):
        poisson(workload, factor, seed=0)


def test_bench_load_refuses_a_scale_for_a_trace_that_is_named_as_a_workload(
    pdserve: Callable[..., CompletedProcess[str]],
) -> None:
    ended = pdserve("bench", "--workload", "azure-code", "--scale", "-1", "--endpoint", "127.0.0.1:1")
    assert (ended.returncode, ended.stderr) == (2, "pdserve: --scale: -1 must be over 0 and finite\n")
