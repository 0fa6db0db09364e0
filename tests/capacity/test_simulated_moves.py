"""Answers that move under virtual time: the real router asks for it, the real workers do it, copies take their time."""

from dataclasses import replace

from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import ANY
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
SHAPE = Shape(1, 2, kv_share=0.2, local_prefill=False)
# By turns, one of the two decode workers gets all of the long answers.
LOPSIDED = Workload("lopsided", tuple(Arrival(0.1 * i, 200, 800 if i % 4 in (1, 2) else 20) for i in range(80)))


def served(shape: Shape) -> tuple[float, int, int]:
    """Return how long the cluster took, how often it preempted a sequence, and how many answers moved.

    Every answer has to be whole, and no part of it computed twice by a router's order.
    """
    cluster = SimCluster(PROFILE, shape, "round_robin", LOPSIDED, ANY)
    run = cluster.run()
    assert [each.num_tokens for each in run.outcomes] == [each.output_tokens for each in LOPSIDED.arrivals]
    placements = [router.placements for router in cluster.routers]
    assert sum(each.num_replaced for each in placements) == 0
    num_preemptions = sum(worker.scheduler.num_preemptions for worker in cluster.workers)
    return run.span_s, num_preemptions, sum(each.shadows.ended["done"] for each in placements)


def test_answers_move_to_where_there_is_room() -> None:
    (alone_s, alone, _), (moving_s, moving, num_moved) = served(SHAPE), served(replace(SHAPE, moves=True))
    assert num_moved > 10
    assert moving < alone / 2
    assert moving_s < 0.8 * alone_s


def test_several_routers_move_answers_only_where_that_is_simulated() -> None:
    three = replace(SHAPE, routers=3)
    assert served(three)[2] == 0
    assert served(replace(three, moves=True))[2] > 10
