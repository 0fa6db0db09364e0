"""Each of several routers predicts from all that its workers have in hand, whoever sent it."""

from statistics import median

import pytest
from goodput_cluster import Cluster, placed, refused_in_the_end

from pdserve.capacity.cluster import simulate
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import Objective, Outcome
from pdserve.measure.read_workload import parse_workload
from pdserve.perfmodel.curve import Step, attention_work
from pdserve.perfmodel.profile import read_profile, shipped_profile
from pdserve.protocol.reports import LoadPart, ReportedLoad
from pdserve.router.requests.commands import Place
from pdserve.router.requests.events import LoadReported, StepReported

PROFILE = read_profile(shipped_profile())


def outcomes(routers: int, objective: Objective) -> list[Outcome]:
    """Return how the requests of two streams came out that were admitted, once the router had learnt enough."""
    requests, found = parse_workload("azure-conv", 0, 0).first(700).scaled(0.25, 2048), list[Outcome]()
    for seed in (3, 4):
        workload = requests.poisson(seed).at_rate(72)
        found += simulate(PROFILE, Shape(2, 2, routers=routers), "goodput", workload, objective).outcomes[100:]
    return [each for each in found if each.is_good]


def ttft_error(told: list[Outcome]) -> float:
    return median(abs(each.predicted_ttft_s / each.ttft_s - 1) for each in told if each.predicted_ttft_s)


@pytest.mark.long
@pytest.mark.parametrize("objective", [Objective(1e6, 1e6), Objective(0.25, 0.1)])
def test_four_routers_predict_about_as_well_as_one(objective: Objective) -> None:
    one, four = outcomes(1, objective), outcomes(4, objective)
    assert ttft_error(four) < 1.5 * ttft_error(one) + 0.01
    for told in (one, four):
        ratios = [each.predicted_ttft_s / each.ttft_s for each in told if each.predicted_ttft_s]
        assert 0.95 < median(ratios) < 1.05


def report(cluster: Cluster, name: str, load: ReportedLoad) -> None:
    cluster.post(LoadReported(cluster.links[name], load))


def predicted(cluster: Cluster, num_tokens: int = 1000) -> tuple[float, float]:
    """Place a request; return the times predicted for it."""
    return cluster.predicted_s(placed(cluster.arrive(num_tokens)))


def test_prompts_that_others_sent_are_waited_for_as_ones_own_are() -> None:
    alone, beside = Cluster(), Cluster()
    for cluster in (alone, beside):
        placed(cluster.arrive(1000))
    for _ in range(3):
        placed(alone.arrive(1000))
    work = 3 * attention_work(1000, 0)
    report(beside, "p0", ReportedLoad(1000, others=LoadPart(waiting_tokens=3000, waiting_work=work, num_taken=3)))
    assert predicted(beside)[0] == pytest.approx(predicted(alone)[0], rel=0.02)
    placed(beside.arrive(1000))
    placed(alone.arrive(1000))
    assert predicted(beside)[0] == pytest.approx(predicted(alone)[0], rel=0.02), "what was sent since counts, too"


def test_what_a_step_computed_of_others_prompts_is_not_taken_off_ours() -> None:
    cluster = Cluster()
    placed(cluster.arrive(1000))
    (worker,) = [each for each in cluster.core.workers if each.name == "p0"]
    report(cluster, "p0", ReportedLoad(1000, others=LoadPart(waiting_tokens=800, num_taken=1, taken_tokens=800)))
    cluster.post(StepReported(cluster.links["p0"], [], Step(800, 640_000), 0.1))
    report(cluster, "p0", ReportedLoad(1000, others=LoadPart(num_taken=1, taken_tokens=800)))
    assert worker.pending_prefill_tokens == 1000


@pytest.mark.parametrize(
    "after",
    [LoadPart(num_taken=2, taken_tokens=1600), LoadPart(num_taken=1, taken_tokens=800)],
    ids=["cached", "given up"],
)
def test_prompts_of_others_that_were_not_computed_leave_ours_as_far_as_it_is(after: LoadPart) -> None:
    cluster = Cluster()
    placed(cluster.arrive(1000))
    (worker,) = [each for each in cluster.core.workers if each.name == "p0"]
    report(cluster, "p0", ReportedLoad(1000))
    cluster.post(StepReported(cluster.links["p0"], [], Step(700, 490_000), 0.1))
    report(cluster, "p0", ReportedLoad(1000, others=LoadPart(waiting_tokens=800, num_taken=1, taken_tokens=800)))
    assert worker.pending_prefill_tokens == 1100
    report(cluster, "p0", ReportedLoad(1000, others=after))
    assert worker.pending_prefill_tokens == 300


def test_sequences_of_others_slow_down_ones_own() -> None:
    quiet, beside = Cluster(), Cluster()
    report(
        beside,
        "d0",
        ReportedLoad(1000, others=LoadPart(num_running=10, num_coming=10, placed_tokens=2000, num_taken=20)),
    )
    assert predicted(beside)[1] > 1.3 * predicted(quiet)[1]


@pytest.mark.parametrize(
    "load",
    [
        ReportedLoad(0),
        ReportedLoad(20, pages_wanted=20),
        ReportedLoad(5, pages_lost=995),
        ReportedLoad(1000, others=LoadPart(num_running=20, placed_tokens=15_000, num_taken=20)),
    ],
    ids=["no free pages", "all wanted", "quarantined", "held by others"],
)
def test_a_worker_without_pages_has_no_room(load: ReportedLoad) -> None:
    cluster = Cluster()
    placed(cluster.arrive(100))
    report(cluster, "d0", load)
    answer = refused_in_the_end(cluster, cluster.arrive(1000, ttft_s=60.0))
    assert "no decode worker has room for 1000 tokens" in answer.message


def test_pages_that_were_sent_for_since_the_report_are_no_longer_free() -> None:
    cluster = Cluster()
    report(cluster, "d0", ReportedLoad(70))
    assert any(isinstance(command, Place) for command in cluster.arrive(1000, ttft_s=60.0)), "it takes 63 pages"
    assert refused_in_the_end(cluster, cluster.arrive(1000, ttft_s=60.0))
