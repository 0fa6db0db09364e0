"""Workers of one role, device and layout share what is learnt of their steps, and no others do."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from goodput_cluster import Cluster, placed

from pdserve.base.ids import Incarnation, WorkerId
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Step, TimedStep
from pdserve.protocol.reports import ReportedLoad
from pdserve.router.placement.learnt import MAX_KINDS, CostsByKind
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.events import LinkId, LinkLost, LoadReported, StepReported


def attach(cluster: Cluster, name: str, device: str, trial: Sequence[TimedStep] = ()) -> WorkerView:
    """Attach a worker like another of its role, but for its device."""
    like = next(worker for worker in cluster.core.workers if worker.name[0] == name[0])
    link = cluster.links[name] = LinkId(len(cluster.links) + 1)
    name_of = {"link": link, "worker_id": WorkerId(name), "incarnation": Incarnation(link)}
    told = replace(like.registration, **name_of, device=device, trial=trial)
    cluster.post(told)
    return cluster.core.workers.known(link)


def compute(cluster: Cluster, worker: WorkerView, factor: float) -> None:
    """Report steps that take so many times as long as 20 ms and 0.1 ms for each token."""
    for i in range(64):
        tokens = 100 + 10 * i
        seconds = factor * (0.02 + 1e-4 * tokens)
        cluster.post(StepReported(worker.link, [], Step(tokens, tokens**2), seconds))


def test_a_slow_device_in_a_pool_has_a_curve_of_its_own() -> None:
    cluster = Cluster(workers="p0 d0", knows=False)
    fast, slow = attach(cluster, "p1", "fast"), attach(cluster, "p2", "slow")
    for _ in range(3):
        compute(cluster, fast, 1.0)
        compute(cluster, slow, 3.0)
    predictor = cluster.predictor
    assert abs(predictor.costs.of(fast).prefill_s(1000, 0, 1024) - 0.12) < 0.01
    assert abs(predictor.costs.of(slow).prefill_s(1000, 0, 1024) - 0.36) < 0.03
    again = attach(cluster, "p3", "slow")
    assert predictor.costs.of(again) is predictor.costs.of(slow)
    cluster.post(LinkLost(cluster.links["p0"], "gone"))
    cluster.post(LinkLost(cluster.links["p2"], "gone"))
    cluster.post(LinkLost(cluster.links["p3"], "gone"))
    assert placed(cluster.arrive(1000)).prefill is not None
    assert attach(cluster, "p4", "slow") is not None
    place = placed(cluster.arrive(1000))
    assert place.prefill is not None
    assert place.prefill.worker_id == "p1", "it waits for one prompt there, and is done sooner"


def test_the_first_prediction_is_by_what_the_first_worker_measured_before_it_was_ready() -> None:
    """Without it, a router believes in an accelerator: on a CPU the first TTFT came out as 17 times the prediction."""
    cluster = Cluster(workers="p0 d0", knows=False)
    cluster.predictor.costs = CostsByKind({})
    prefill, decode = Step(prefill_tokens=100, prefill_work=100**2), Step(sequences=1, kv_tokens=100)
    trial = (TimedStep(prefill, 2.0), TimedStep(decode, 0.25))
    slow = [attach(cluster, name, "slow", trial) for name in ("p1", "d1")]
    costs = [cluster.predictor.costs.of(worker) for worker in slow]
    assert costs[0].prefill_s(100, 100**2, 1024) == pytest.approx(2.0, rel=0.1)
    assert costs[1].decode_s(1, 100) == pytest.approx(0.25, rel=0.1)
    assert not costs[0].knows_prefill(cluster.now_s), "nothing is refused on the word of a trial"
    cluster.post(StepReported(slow[0].link, [], prefill, 1.0))
    assert costs[0].prefill_s(100, 100**2, 1024) < 1.5, "what requests show soon counts for more"


def test_costs_that_the_operator_gave_stand_before_measured_ones() -> None:
    cluster = Cluster(workers="p0 d0", knows=False)
    worker = attach(cluster, "p1", "other", (TimedStep(Step(prefill_tokens=100, prefill_work=100**2), 2.0),))
    assert cluster.predictor.costs.of(worker).prefill_s(100, 0, 1024) == pytest.approx(0.03)


def test_what_is_learnt_of_a_kind_outlives_its_workers_and_kinds_are_bounded() -> None:
    cluster = Cluster(workers="p0 d0", knows=False)
    slow = attach(cluster, "p1", "slow")
    compute(cluster, slow, 3.0)
    learnt = cluster.predictor.costs.of(slow)
    cluster.post(LinkLost(slow.link, "gone"))
    assert cluster.predictor.costs.of(attach(cluster, "p2", "slow")) is learnt
    for number in range(2 * MAX_KINDS):
        worker = attach(cluster, f"p{3 + number}", f"device {number}")
        compute(cluster, worker, 1.0)
        cluster.post(LinkLost(worker.link, "gone"))
    assert len(cluster.predictor.costs.kinds()) <= MAX_KINDS + 1
    assert cluster.predictor.costs.of(cluster.core.workers.known(cluster.links["p2"])) is learnt


def test_what_a_better_worker_could_do_idle_is_not_called_impossible() -> None:
    cluster = Cluster(workers="p0 d0")
    slow = attach(cluster, "p1", "slow")
    compute(cluster, slow, 3.0)
    for _ in range(8):
        placed(cluster.arrive(1000))
    assert "cannot be met here" not in str(cluster.arrive(1000, ttft_s=0.2))


def test_a_worker_that_takes_a_role_costs_what_others_of_it_do_and_a_mixed_one_what_decode_workers_do() -> None:
    cluster = Cluster(workers="p0 d0 d1 m0")
    p0, d0, d1, m0 = (cluster.core.workers.known(link) for link in cluster.links.values())
    costs = cluster.predictor.costs
    assert costs.of(m0) is costs.of(d0) is not costs.of(p0)
    cluster.post(LoadReported(d1.link, ReportedLoad(1000, role=Role.PREFILL, role_epoch=1)))
    assert costs.of(d1) is costs.of(p0)
