"""The capacity simulator: workloads, measures, plans."""

from dataclasses import replace
from statistics import median

import pytest

from pdserve.capacity import planner
from pdserve.capacity.cluster import Run, simulate
from pdserve.capacity.long_run import Question, measure
from pdserve.capacity.planner import Search, candidates, highest_rate, plan
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective
from pdserve.measure.read_workload import parse_workload
from pdserve.measure.tables import as_json
from pdserve.measure.workload import Arrival, Workload, random_lengths
from pdserve.perfmodel.profile import WindowFields, read_profile, shipped_profile
from pdserve.router.placement.policies import POLICIES

PROFILE = read_profile(shipped_profile())
SLIDING = PROFILE.model_copy(update={"window": WindowFields(tokens=128, ratio=3)})
OBJECTIVE = Objective(0.25, 0.1)
SEARCHED_TO = 1.06  # a rate is bisected to within 4 %, and another cluster has to be 2 % better
SHAPES = [Shape(0, 2), Shape(1, 1), Shape(2, 2, local_prefill=False)]


def times(run: Run) -> list[tuple[float, float, int, str]]:
    return [(outcome.first_s, outcome.last_s, outcome.num_tokens, outcome.status) for outcome in run.outcomes]


@pytest.mark.parametrize("shape", [Shape(0, 1), Shape(1, 1)], ids=str)
def test_an_answer_ends_where_the_model_does_and_others_go_on(shape: Shape) -> None:
    longest = PROFILE.configuration(1).kv_tokens
    workload = Workload("long", (Arrival(0.0, longest - 100, 300), Arrival(1.0, 100, 10)))
    run = simulate(PROFILE, shape, "round_robin", workload, OBJECTIVE)
    lengths = [outcome.num_tokens for outcome in run.outcomes]
    assert 0 < lengths[0] <= 100
    assert lengths[1] == 10


def test_windows_make_room_for_prompts_that_else_would_wait() -> None:
    """As many tokens have pages, but three of four layers need those of their windows alone."""
    workload = Workload("long", tuple(Arrival(i * 0.01, 3000, 600) for i in range(24)))
    shape = Shape(1, 1, kv_share=0.5, prefill_chunk=512, decode_chunk=256)
    ends = [
        max(outcome.last_s for outcome in simulate(profile, shape, "round_robin", workload, OBJECTIVE).outcomes)
        for profile in (PROFILE, SLIDING)
    ]
    assert ends[1] < 0.8 * ends[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_policy_loses_or_doubles_a_request_under_overload(policy: str, shape: Shape) -> None:
    workload = random_lengths(150, 400, 40, 2).at_rate(60)
    run = simulate(PROFILE, shape, policy, workload, OBJECTIVE)
    assert len(run.outcomes) == 150
    for outcome in run.outcomes:
        assert outcome.is_refused or outcome.num_tokens == outcome.output_tokens
        assert outcome.status in ("OK", "RESOURCE_EXHAUSTED")


def test_a_simulation_is_repeatable() -> None:
    workload = random_lengths(80, 300, 30, 3).at_rate(20)
    first, second = (simulate(PROFILE, Shape(1, 1), "goodput", workload, OBJECTIVE) for _ in range(2))
    assert times(first) == times(second)


def test_a_lone_request_takes_what_the_profile_says() -> None:
    workload = Workload("two", (Arrival(0.0, 1000, 11), Arrival(100.0, 1000, 11)))
    outcome = simulate(PROFILE, Shape(1, 1), "round_robin", workload, OBJECTIVE).outcomes[0]
    costs = PROFILE.configuration(1).costs()
    assert outcome.ttft_s == pytest.approx(costs.prefill.seconds(1000, 1000**2))
    transfer_s = 1024 * PROFILE.kv_bytes_per_token / PROFILE.link.bytes_per_s + PROFILE.link.latency_s
    decoding_s = sum(costs.decode_curve(1).seconds(1, 1001 + i) for i in range(10))
    assert outcome.last_s - outcome.first_s == pytest.approx(transfer_s + decoding_s, rel=1e-6)


def test_shared_prefixes_are_computed_once() -> None:
    blocks = tuple(range(30))
    same = Workload("same", tuple(Arrival(i * 10.0, 1930, 4, blocks) for i in range(5)), block_tokens=64)
    outcomes = simulate(PROFILE, Shape(1, 1), "goodput", same, OBJECTIVE).outcomes
    assert outcomes[1].ttft_s < 0.3 * outcomes[0].ttft_s


def test_links_are_shared() -> None:
    slow = PROFILE.model_copy(update={"link": PROFILE.link.model_copy(update={"bytes_per_s": 1e9})})
    together = Workload("together", tuple(Arrival(0.001 * i, 1000, 2) for i in range(4)))
    ends = sorted(o.last_s for o in simulate(slow, Shape(4, 1), "round_robin", together, OBJECTIVE).outcomes)
    one_s = 1024 * PROFILE.kv_bytes_per_token / 1e9
    assert ends[-1] - ends[0] == pytest.approx(3 * one_s, rel=0.1)


@pytest.mark.long
def test_goodput_under_overload_is_not_below_round_robin_and_what_is_admitted_is_kept() -> None:
    question = Question(PROFILE, random_lengths(3000, 300, 60, 4), OBJECTIVE, max_requests=3000)
    ours, turns = (measure(question, Shape(2, 2), policy, 16.0) for policy in ("goodput", "round_robin"))
    assert ours.goodput_per_gpu > 1.5 * turns.goodput_per_gpu
    assert ours.attainment / (1 - ours.refused) > 0.9


def test_times_per_token_come_out_as_predicted_where_answers_have_the_lengths_that_were_asked_for() -> None:
    workload = replace(random_lengths(900, 300, 40, 5).at_rate(20), exact=True)
    run = simulate(PROFILE, Shape(1, 1, local_prefill=False), "goodput", workload, Objective(1e6, 1e6))
    told = [(each.predicted_tpot_s, each.tpot_s) for each in run.outcomes[300:] if each.num_tokens > 1]
    errors = [abs(predicted_s / seen_s - 1) for predicted_s, seen_s in told if predicted_s is not None]
    assert len(errors) > 500
    assert median(errors) < 0.04


def test_what_is_learnt_under_overload_does_not_turn_requests_away_from_a_pool() -> None:
    workload = parse_workload("azure-conv", 0, 0).scaled(0.25, 2048).poisson(0)
    run = simulate(PROFILE, Shape(2, 2), "goodput", workload.at_rate(128.0), OBJECTIVE)
    assert sum(outcome.meets(OBJECTIVE) for outcome in run.outcomes) > 0.8 * len(run.outcomes)


@pytest.mark.long
def test_no_rate_keeps_objectives_that_cannot_be_met() -> None:
    question = Question(PROFILE, random_lengths(50, 300, 30, 5), Objective(0.001, 0.1))
    found = highest_rate(question, Shape(1, 1), "round_robin", 0.9)
    assert found.point is None
    assert found.is_settled


@pytest.mark.long
def test_a_plan_is_never_below_the_best_colocated_cluster() -> None:
    question = Question(PROFILE, random_lengths(500, 300, 30, 6), OBJECTIVE, max_requests=500)
    found = plan(question, 2, 0.9, lambda *_: None)
    assert found is not None
    assert found.colocated is not None
    assert found.best.rate_per_gpu >= found.colocated.rate_per_gpu
    assert "busy" in found.binds
    assert found.kv_share < 1  # so short requests leave most pages empty
    assert all(shape.num_gpus == 2 for shape in candidates(PROFILE, 2))


@pytest.mark.long
@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "mooncake"])
def test_no_colocated_cluster_sustains_more_than_the_plan(name: str) -> None:
    profile = PROFILE.model_copy(update={"configurations": PROFILE.configurations[:1]})
    output_scale = {"azure-code": 1.0}.get(name, 0.25)
    workload = parse_workload(name, 0, 0).scaled(1 / 16, 1700, output_scale).poisson(0)
    question = Question(profile, workload, OBJECTIVE, max_requests=400)
    found = plan(question, 2, 0.9, lambda *_: None)
    assert found is not None
    for shape in candidates(profile, 2):
        for policy in ("goodput", "round_robin") if not shape.prefill else ():
            alone = Search(question, shape, policy, 0.9).highest().point
            assert alone is None or alone.rate_per_gpu <= found.best.rate_per_gpu * SEARCHED_TO


def test_a_report_names_cluster_policy_and_rate() -> None:
    question = Question(PROFILE, random_lengths(30, 100, 10, 0), OBJECTIVE)
    point = measure(question, Shape(1, 1), "goodput", 2.0)
    text = as_json(planner.results([point], "title"))
    assert '"policy": "goodput"' in text
    assert planner.figures(point)["name"] == "1 x tp1 prefill + 1 x tp1 decode, goodput, 2.00/s a GPU"


def test_attainment_is_drawn_over_the_rate_for_each_cluster_and_policy() -> None:
    question = Question(PROFILE, random_lengths(30, 100, 10, 0), OBJECTIVE)
    points = [
        measure(question, Shape(1, 1), policy, rate)
        for policy, rate in (("goodput", 3.0), ("goodput", 2.0), ("round_robin", 2.0))
    ]
    drawn = {line.name: list(line.points) for line in planner.chart(points, 0.9).lines}
    assert list(drawn) == [
        "1 x tp1 prefill + 1 x tp1 decode, goodput",
        "1 x tp1 prefill + 1 x tp1 decode, round_robin",
        "wanted",
    ]
    assert [rate for rate, _ in drawn["1 x tp1 prefill + 1 x tp1 decode, goodput"]] == [2.0, 3.0]
    assert drawn["wanted"] == [(0.0, 90.0), (3.0, 90.0)]
