"""Workers under virtual time that come, drain, change roles and slow down: nobody's answer is cut or doubled."""

import pytest

from pdserve.base.errors import CommandError
from pdserve.base.roles import POOLS, Role
from pdserve.capacity.cluster import Run
from pdserve.capacity.fleet import Fleet
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import ANY
from pdserve.measure.workload import random_lengths
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
WORKLOAD = random_lengths(300, 400, 150, 5).at_rate(10)


def cluster(prefill: int, decode: int) -> Fleet:
    return Fleet(PROFILE, Shape(prefill, decode, local_prefill=False), WORKLOAD, ANY, dict.fromkeys(POOLS, 0.0))


def served(simulated: Fleet) -> Run:
    """Serve the workload; every answer has to be whole, and none is placed twice: it moves, or ends where it is."""
    run = simulated.run()
    assert simulated.router.placements.num_replaced == 0
    assert [each.num_tokens for each in run.outcomes] == [each.output_tokens for each in WORKLOAD.arrivals]
    return run


def names(simulated: Fleet) -> list[str]:
    return sorted(worker.peer.worker_id for worker in simulated.workers)


def test_a_worker_that_comes_late_takes_its_share() -> None:
    simulated = cluster(1, 1)
    simulated.clock.at(10.0, simulated.add, "late", Role.DECODE)
    served(simulated)
    steps = {worker.peer.worker_id: worker.num_steps for worker in simulated.workers}
    assert steps["late"] > 0.3 * steps["d0"]


def test_a_drained_worker_leaves_at_once_because_its_answers_move() -> None:
    simulated, left_s = cluster(2, 3), list[float]()
    simulated.clock.at(10.0, simulated.drain, "d1")
    simulated.clock.at(10.0, simulated.drain, "p0")
    simulated.clock.at(12.0, lambda: left_s.append(len(names(simulated))))
    served(simulated)
    assert left_s == [3]
    assert names(simulated) == ["d0", "d2", "p1"]


def test_a_worker_that_drains_alone_finishes_what_it_decodes() -> None:
    simulated = cluster(1, 1)
    simulated.clock.at(10.0, simulated.drain, "d0")
    simulated.clock.at(14.0, simulated.add, "next", Role.DECODE)
    served(simulated)
    assert names(simulated) == ["next", "p0"]


def test_a_worker_changes_its_role_there_and_back() -> None:
    simulated, seen = cluster(1, 3), list[tuple[int, int]]()

    def look() -> None:
        workers = simulated.router.workers
        seen.append((len(workers.routable(Role.PREFILL)), len(workers.routable(Role.DECODE))))

    simulated.clock.at(8.0, simulated.flip, "d0", Role.PREFILL)
    simulated.clock.at(14.0, look)
    simulated.clock.at(18.0, simulated.flip, "d0", Role.DECODE)
    simulated.clock.at(24.0, look)
    served(simulated)
    assert seen == [(2, 2), (1, 3)]


def test_the_last_worker_of_a_pool_keeps_its_role() -> None:
    with pytest.raises(CommandError, match="only worker"):
        cluster(1, 1).flip("d0", Role.PREFILL)


def test_steps_of_a_slow_stretch_take_longer_and_those_after_it_do_not() -> None:
    usual, slow = cluster(1, 1), cluster(1, 1)
    slow.clock.at(10.0, slow.slow_down, 1.5)
    slow.clock.at(20.0, slow.slow_down, 1.0)
    before, after = served(usual).outcomes, served(slow).outcomes

    def tpot(first_s: float, last_s: float) -> float:
        pairs = [
            (a.tpot_s, b.tpot_s)
            for a, b in zip(before, after, strict=True)
            if first_s < a.first_s and b.last_s < last_s
        ]
        return sum(b for _, b in pairs if b) / sum(a for a, _ in pairs if a)

    assert 1.3 < tpot(10.0, 20.0) < 1.9
    assert tpot(0.0, 10.0) == pytest.approx(1.0)
    assert tpot(24.0, 99.0) < 1.15
