"""Who computes at the same time on one machine, and how long answers get."""

import pytest
from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.session import Peer
from pdserve.router.events import LinkId, LoadReported, Registration, Role
from pdserve.router.lengths import AnswerLengths
from pdserve.router.machines import Machines
from pdserve.router.view import Share, WorkerView
from pdserve.router.wire import worker_events
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Placed, RouterRef
from pdserve.worker.wire import heartbeat

KEY = RequestId(bytes(16)), Attempt(0)


def worker(link: int, role: Role, host: str = "box") -> WorkerView:
    layout = KvLayout("w", 1, 1, 8, 16, "float32")
    name = WorkerId(f"w{link}")
    process = LinkId(link), name, Incarnation(link), role
    return WorkerView(Registration(*process, 1, True, "m", layout, 1000, 32, 10_000, "", 512, host), 0.0)


def run_alternately(machines: Machines, decode: WorkerView, prefill: WorkerView, busy_s: float, idle_s: float) -> float:
    """Let the prefill worker compute and rest in turn, a hundred times; return the time."""
    now_s = 0.0
    machines.look(prefill, now_s)
    machines.look(decode, now_s)
    for _ in range(100):
        prefill.assign(KEY, Share(0, 100, 10_000), now_s)
        machines.look(prefill, now_s)
        now_s += busy_s
        prefill.unassign(KEY)
        machines.look(prefill, now_s)
        now_s += idle_s
    return now_s


def test_a_step_is_told_how_much_of_it_a_neighbour_computed() -> None:
    machines, prefill, decode = Machines(), worker(1, Role.PREFILL), worker(2, Role.DECODE)
    decode.assign(KEY, Share(1, 0), 0.0)
    machines.look(prefill, 0.0)
    machines.end_step(decode, 1.0, 10.0)
    prefill.assign(KEY, Share(0, 100, 10_000), 10.3)
    machines.look(prefill, 10.3)
    assert machines.end_step(decode, 1.0, 11.0) == pytest.approx(0.7)
    assert machines.end_step(decode, 1.0, 12.0) == pytest.approx(1.0)


def test_workers_of_other_or_unknown_machines_are_no_neighbours() -> None:
    machines, decode = Machines(), worker(2, Role.DECODE)
    for number, host in enumerate(("other", ""), start=3):
        stranger = worker(number, Role.PREFILL, host)
        stranger.assign(KEY, Share(0, 100, 10_000), 0.0)
        machines.look(stranger, 0.0)
    machines.look(decode, 0.0)
    assert machines.end_step(decode, 1.0, 1.0) == 0.0
    assert machines.end_step(worker(5, Role.DECODE, ""), 1.0, 1.0) is None
    assert machines.expected(decode, 5.0) == 0.0


def test_what_is_seen_now_is_believed_for_a_while_and_then_the_share_of_lately() -> None:
    machines, prefill, decode = Machines(), worker(1, Role.PREFILL), worker(2, Role.DECODE)
    now_s = run_alternately(machines, decode, prefill, busy_s=1.0, idle_s=3.0)
    assert machines.expected(decode, 0.01) == pytest.approx(0.0, abs=0.02)
    assert machines.expected(decode, 1000.0) == pytest.approx(0.25, abs=0.02)
    prefill.assign(KEY, Share(0, 100, 10_000), now_s)
    machines.look(prefill, now_s)
    assert machines.expected(decode, 0.01) == pytest.approx(1.0, abs=0.02)
    machines.forget(prefill)
    assert machines.expected(decode, 0.01) == 0.0


def test_answers_are_as_long_as_the_better_guess() -> None:
    exact, generous = AnswerLengths(), AnswerLengths()
    for number in range(500):
        length = 10 + 90 * (number % 2)
        exact.observe(length, length)
        generous.observe(30 + number % 5, 1000 * (1 + number % 7))
    assert exact.expected(77) == pytest.approx(77, rel=0.02)
    assert generous.expected(5000) == pytest.approx(32, rel=0.05)
    assert generous.expected(20) == 20


def test_what_is_overdue_goes_on_for_as_long_as_answers_have_been_overdue() -> None:
    lengths = AnswerLengths()
    for number in range(500):  # half as expected, half twice as long
        lengths.observe(50 + 100 * (number % 2), 1000)
    assert lengths.overdue_tokens == pytest.approx(50, rel=0.2)
    exact = AnswerLengths()
    for _ in range(500):
        exact.observe(70, 70)
    assert exact.overdue_tokens == 1.0


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
