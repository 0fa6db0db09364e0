"""Who computes at the same time on one machine, and what that does to steps."""

import random
from math import log

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.session import Peer
from pdserve.perfmodel.curve import Curve, Step
from pdserve.perfmodel.model import LearntCosts
from pdserve.roles import Role
from pdserve.router.events import LinkId, LoadReported, Registration
from pdserve.router.neighbours import Neighbours, Slowdown
from pdserve.router.view import Share, WorkerView
from pdserve.router.wire import worker_events
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Placed, RouterRef
from pdserve.worker.wire import heartbeat

DECODE = Curve(0.025, 2e-3, 1e-6)
KEY = RequestId(bytes(16)), Attempt(0)


def worker(link: int, role: Role, host: str = "box") -> WorkerView:
    layout = KvLayout("w", 1, 1, 8, 16, "float32")
    name = WorkerId(f"w{link}")
    process = LinkId(link), name, Incarnation(link), role
    return WorkerView(Registration(*process, 1, True, "m", layout, 1000, 32, 10_000, "", 512, host), 0.0)


def run_alternately(
    neighbours: Neighbours, decode: WorkerView, prefill: WorkerView, busy_s: float, idle_s: float
) -> float:
    """Let the prefill worker compute and rest in turn, a hundred times; return the time."""
    now_s = 0.0
    neighbours.look(prefill, now_s)
    neighbours.look(decode, now_s)
    for _ in range(100):
        prefill.assign(KEY, Share(0, 100, 10_000), now_s)
        neighbours.look(prefill, now_s)
        now_s += busy_s
        prefill.unassign(KEY)
        neighbours.look(prefill, now_s)
        now_s += idle_s
    return now_s


def expected(neighbours: Neighbours, worker: WorkerView, horizon_s: float) -> float:
    """Return the share of the time from now on that a neighbour will compute: it doubles what a step takes."""
    neighbours.learnt(worker.role, prefills=False).log_each = log(2)
    return neighbours.slowdown(worker, horizon_s, prefills=False) - 1


def test_a_step_is_told_how_much_of_it_a_neighbour_computed() -> None:
    neighbours, prefill, decode = Neighbours(), worker(1, Role.PREFILL), worker(2, Role.DECODE)
    decode.assign(KEY, Share(1, 0), 0.0)
    neighbours.look(prefill, 0.0)
    neighbours.busy_during(decode, 1.0, 10.0)
    prefill.assign(KEY, Share(0, 100, 10_000), 10.3)
    neighbours.look(prefill, 10.3)
    assert neighbours.busy_during(decode, 1.0, 11.0) == pytest.approx(0.7)
    assert neighbours.busy_during(decode, 1.0, 12.0) == pytest.approx(1.0)


def test_workers_of_other_or_unknown_machines_are_no_neighbours() -> None:
    neighbours, decode = Neighbours(), worker(2, Role.DECODE)
    for number, host in enumerate(("other", ""), start=3):
        stranger = worker(number, Role.PREFILL, host)
        stranger.assign(KEY, Share(0, 100, 10_000), 0.0)
        neighbours.look(stranger, 0.0)
    neighbours.look(decode, 0.0)
    assert neighbours.busy_during(decode, 1.0, 1.0) == 0.0
    assert neighbours.busy_during(worker(5, Role.DECODE, ""), 1.0, 1.0) is None
    assert expected(neighbours, decode, 5.0) == 0.0


def test_what_is_seen_now_is_believed_for_a_while_and_then_the_share_of_lately() -> None:
    neighbours, prefill, decode = Neighbours(), worker(1, Role.PREFILL), worker(2, Role.DECODE)
    now_s = run_alternately(neighbours, decode, prefill, busy_s=1.0, idle_s=3.0)
    assert expected(neighbours, decode, 0.01) == pytest.approx(0.0, abs=0.02)
    assert expected(neighbours, decode, 1000.0) == pytest.approx(0.25, abs=0.02)
    prefill.assign(KEY, Share(0, 100, 10_000), now_s)
    neighbours.look(prefill, now_s)
    assert expected(neighbours, decode, 0.01) == pytest.approx(1.0, abs=0.02)
    neighbours.forget(prefill)
    assert expected(neighbours, decode, 0.01) == 0.0


def test_a_prefill_worker_whose_prompts_are_computed_is_idle_while_their_pages_are_on_their_way() -> None:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, eos_token_ids=frozenset())
    core, view = (
        WorkerCore(Scheduler(KvCache(32, 4, None), limits), 100, 64, b"", default_rules()),
        worker(1, Role.PREFILL),
    )
    job = Job(KEY[0], KEY[1], tuple(range(10)), 10, SamplingParams(max_tokens=4), (0,))
    core.handle(
        Placed(RouterRef(1), job, 1e9, target=Peer(WorkerId("d"), Incarnation(1)), target_address="host:1"), 0.0
    )
    view.assign(KEY, Share(0, 10, 100), 0.0)
    assert view.is_busy
    plan = core.plan(0.0)
    assert plan is not None
    core.commit(plan, FakeRunner(32, 4, 100).run(plan), 0.0)
    view.prefilled(KEY, 0.1)
    assert core.load().num_handoffs == 1
    (event,) = worker_events(view.link, heartbeat(core.load(), 1, {}, RouterRef(1)))
    assert isinstance(event, LoadReported)
    view.report(event.load)
    assert not view.is_busy


@pytest.mark.parametrize("factor", [1.0, 1.3, 2.0])
def test_the_slowdown_and_the_cost_alone_are_told_apart(factor: float) -> None:
    rng, costs, neighbours = random.Random(3), LearntCosts(), Neighbours()
    decode, prefill = worker(2, Role.DECODE), worker(1, Role.PREFILL)
    decode.assign(KEY, Share(1, 0), 0.0)
    now_s = 0.0
    for view in (prefill, decode):
        neighbours.look(view, now_s)
    for _ in range(1500):
        is_beside = rng.random() < 0.4
        if is_beside:
            prefill.assign(KEY, Share(0, 100, 10_000), now_s)
            neighbours.look(prefill, now_s)
        step = Step(sequences=rng.randrange(1, 30), kv_tokens=rng.randrange(1, 10_000))
        elapsed_s = DECODE.seconds(step.sequences, step.kv_tokens) * factor**is_beside * rng.uniform(0.9, 1.1)
        now_s += elapsed_s
        alone_s = neighbours.alone_s(decode, (costs.seconds(step), elapsed_s), now_s, prefills=False)
        costs.observe(step, alone_s, now_s)
        if is_beside:
            prefill.unassign(KEY)
            neighbours.look(prefill, now_s)
    assert costs.decode_s(10, 3000) == pytest.approx(DECODE.seconds(10, 3000), rel=0.08)
    assert neighbours.learnt(Role.DECODE, prefills=False).each == pytest.approx(factor, rel=0.08)


def test_nothing_is_learnt_of_neighbours_that_never_rest() -> None:
    slowdown = Slowdown()
    for _ in range(500):
        slowdown.observe(1.0, 3.0)
    assert slowdown.each == pytest.approx(1.0)


def test_neighbours_are_never_taken_to_speed_a_step_up() -> None:
    slowdown = Slowdown()
    for number in range(500):
        slowdown.observe(float(number % 2), 1.0 - 0.5 * (number % 2))
    assert slowdown.each == 1.0
