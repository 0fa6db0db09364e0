"""Who computes at the same time on one machine, and how long answers get."""

import pytest

from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvlayout import KvLayout
from pdserve.router.events import LinkId, Registration, Role
from pdserve.router.lengths import AnswerLengths
from pdserve.router.machines import Machines
from pdserve.router.view import Share, WorkerView

KEY = RequestId(bytes(16)), Attempt(0)


def worker(link: int, role: Role, host: str = "box") -> WorkerView:
    layout = KvLayout("w", 1, 1, 8, 16, "float32")
    name = WorkerId(f"w{link}")
    told = Registration(name, Incarnation(link), role, 1, True, "m", layout, 1000, 32, 10_000, "", 512, host)
    return WorkerView(LinkId(link), told, 0.0)


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
