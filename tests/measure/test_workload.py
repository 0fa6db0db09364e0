"""A workload says what is sent and when, the same each time for the same seed."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from pdserve.base.errors import ConfigError
from pdserve.measure.read_workload import parse_workload, read_trace, trace_path
from pdserve.measure.workload import Arrival, Workload, random_lengths, random_prompts


def parse(text: str) -> Workload:
    return parse_workload(text, 2000, 0)


def test_numxinxout_is_so_many_requests_of_these_lengths_all_at_once() -> None:
    workload = parse("3x32x128")
    assert workload.name == "3x32x128"
    assert workload.arrivals == (Arrival(0.0, 32, 128),) * 3
    assert parse("1x1x1").scaled(1.0, 10).arrivals == (Arrival(0.0, 1, 1),)


@pytest.mark.parametrize(
    "text",
    [
        *("", "many", "0x1x1", "1x-2x3", "ax2x3", "1x2x3x4", "1.5x2x3", "1e7x2x3"),
        *("infx10", "10xnan", "0x5", "5x1e9", "5x5~inf", "5x5~-1", "1x2x3~0.5"),
    ],
)
def test_what_is_neither_lengths_nor_a_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--workload: '"):
        parse(text)


def test_random_requests_come_at_the_rate_asked_for_with_the_lengths_of_the_workload() -> None:
    arrivals = parse("800x80").scaled(0.5, 1000).during(100.0, 20.0, 3)
    assert 1850 < len(arrivals) < 2150
    assert arrivals[-1].at_s <= 100.0
    assert statistics.mean(each.prompt_tokens for each in arrivals) == pytest.approx(400, rel=0.1)
    assert statistics.mean(each.output_tokens for each in arrivals) == pytest.approx(40, rel=0.1)
    assert max(arrival.prompt_tokens for arrival in arrivals) <= 1000


def test_poisson_arrivals_keep_the_requests_and_come_at_the_rate() -> None:
    workload = parse("4000x5x6").poisson(seed=1, rate=8.0)
    starts = [arrival.at_s for arrival in workload.arrivals]
    gaps = [b - a for a, b in pairwise(starts)]
    assert starts == sorted(starts)
    assert {(a.prompt_tokens, a.output_tokens) for a in workload.arrivals} == {(5, 6)}
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # as wide as its mean: exponential


def test_equal_seeds_give_equal_workloads_and_prompts() -> None:
    first, again, other = (parse("20x9x4").poisson(seed, 2.0) for seed in (7, 7, 8))
    assert first == again != other
    prompts = [random_prompts(first.arrivals, 1000, seed) for seed in (7, 7, 8)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_prompts_have_their_lengths_and_stay_in_the_vocabulary() -> None:
    arrivals = (Arrival(0, 1, 1), Arrival(0, 300, 1))
    drawn = random_prompts(arrivals, vocab_size=7, seed=0)
    assert [len(ids) for ids in drawn] == [1, 300]
    assert set(drawn[1]) == set(range(7))


def test_a_trace_is_sent_at_its_own_times_or_stretched_to_a_rate_and_other_requests_at_once_or_at_random() -> None:
    trace = Workload("trace", (Arrival(0.5, 7, 8), Arrival(2.0, 5, 6), Arrival(2.5, 5, 6)))
    assert [each.at_s for each in trace.sent_at(None, 0).arrivals] == [0.0, 1.5, 2.0]
    assert [each.at_s for each in trace.sent_at(4.0, 0).arrivals] == [0.0, 0.375, 0.5]
    for other in (parse("20x3x4"), random_lengths(20, 3, 4, 0)):
        assert {each.at_s for each in other.sent_at(None, 0).arrivals} == {0.0}
        assert len({each.at_s for each in other.sent_at(4.0, 0).arrivals}) == 20


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,x,3\n", "line 2: ContextTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.97,5\n", "line 2: GeneratedTokens: Field required"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,3\n", "line 2: TIMESTAMP"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": -1, "hash_ids": []}',
            "line 1: output_length",
        ),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1}\n', "line 1: hash_ids: Field required"),
        ("a.jsonl", "{", "line 1: Invalid JSON"),
        ("a.json", '[{"start_time": "NaN", "prompt_len": 1, "output_len": 1}]', "entry 0: start_time"),
        ("a.json", '[{"start_time": 0, "prompt_len": 0, "output_len": 1}]', "entry 0: prompt_len"),
        ("a.json", '[{"start_time": 0, "prompt_len": 1, "output_len": 1, "x": 1}]', "entry 0: x: Extra"),
        ("a.json", '{"start_time": 1}', "it has to be a list"),
        ("a.json", "[1]", "entry 0: Input should be a valid dictionary"),
        ("a.json", "[]", "0 requests"),
        ("a.json", "[", "Expecting value"),
        ("a.txt", "", "known are"),
    ],
)
def test_a_broken_trace_names_file_place_and_field(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert name in str(caught.value)
    assert said in str(caught.value)


def test_the_three_kinds_of_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    workload = read_trace(azure)
    assert workload.rate == pytest.approx(1 / 0.052, rel=1e-3)
    mooncake = tmp_path / "a.jsonl"
    row = '{"timestamp": %d, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    mooncake.write_text(row % 0 + row % 3000)
    workload = read_trace(mooncake).scaled(1 / 16, 2048)
    assert workload.block_tokens == 32
    assert workload.arrivals[1] == Arrival(3.0, 64, 31, (0, 1, 2))
    listed = tmp_path / "a.json"
    listed.write_text(
        '[{"start_time": 2, "prompt_len": 7, "output_len": 3}, {"start_time": 1, "prompt_len": 8, "output_len": 4}]'
    )
    assert [arrival.prompt_tokens for arrival in read_trace(listed).arrivals] == [8, 7]
    assert read_trace(listed).at_rate(4.0).rate == pytest.approx(4.0)


@pytest.mark.parametrize(("name", "count"), [("azure-conv", 600), ("azure-code", 600), ("mooncake", 400)])
def test_a_slice_of_each_trace_comes_with_pdserve_and_is_known_by_its_name(name: str, count: int) -> None:
    workload = parse(name)
    assert len(workload.arrivals) == count
    assert bool(workload.block_tokens) is (name == "mooncake")
    assert name in trace_path(name).with_name("README.md").read_text()
    assert trace_path("elsewhere.csv") == Path("elsewhere.csv")


def test_a_trace_is_repeated_without_sharing_prefixes_with_itself() -> None:
    trace = parse("mooncake")
    stream = trace.endless(8.0)
    rounds = [[next(stream) for _ in trace.arrivals] for _ in range(2)]
    times = [each.at_s for each in rounds[0] + rounds[1]]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(8.0, rel=0.02)
    names = [{name for each in arrivals for name in each.blocks} for arrivals in rounds]
    assert names[0].isdisjoint(names[1])
    assert [len(each.blocks) for each in rounds[0]] == [len(each.blocks) for each in rounds[1]]


def test_random_requests_come_in_another_order_and_with_other_gaps_each_time_round() -> None:
    stream = random_lengths(200, 300, 30, 1).endless(4.0)
    first, second = ([next(stream) for _ in range(200)] for _ in range(2))
    assert [each.prompt_tokens for each in first] != [each.prompt_tokens for each in second]
    assert sorted(each.prompt_tokens for each in first) == sorted(each.prompt_tokens for each in second)
    assert second[0].at_s > first[-1].at_s


def test_a_stretch_of_a_workload_begins_at_0() -> None:
    workload = Workload("some", tuple(Arrival(100.0 + second, 10, 2) for second in range(10)))
    assert [each.at_s for each in workload.between(3.0, 6.0).arrivals] == [0.0, 1.0, 2.0]
    with pytest.raises(ConfigError, match="1 requests between 3 and 4 s"):
        workload.between(3.0, 4.0)


def test_a_multiplied_workload_repeats_requests_within_seconds_and_each_turn_has_blocks_of_its_own() -> None:
    workload = Workload("some", tuple(Arrival(60.0 * minute, minute + 1, 2, (0, minute)) for minute in range(200)), 16)
    more = workload.multiplied(2.5, 1).arrivals
    assert 470 < len(more) < 530
    assert [each.at_s for each in more] == sorted(each.at_s for each in more)
    for each in more:
        assert 0 <= each.at_s - 60.0 * (each.prompt_tokens - 1) <= 10.0
    assert {each.blocks[0] for each in more} == {0, 200, 400}
    assert workload.multiplied(1, 1).arrivals == workload.arrivals
    assert 70 < len(workload.multiplied(0.5, 1).arrivals) < 130
