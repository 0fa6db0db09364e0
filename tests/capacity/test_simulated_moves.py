"""Answers that move under virtual time: the real router asks for it, the real workers do it, copies take their time."""

from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.shape import Shape, Ways
from pdserve.measure.objectives import ANY
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
SHAPE = Shape(1, 2, kv_share=0.2, local_prefill=False)
# By turns, one of the two decode workers gets all of the long answers.
LOPSIDED = Workload("lopsided", tuple(Arrival(0.1 * i, 200, 800 if i % 4 in (1, 2) else 20) for i in range(80)))


def served(ways: Ways) -> tuple[float, int]:
    """Return how long the cluster took, and how often it preempted a sequence; every answer has to be whole."""
    cluster = SimCluster(PROFILE, SHAPE, "round_robin", LOPSIDED, ANY, ways)
    run = cluster.run()
    assert [each.num_tokens for each in run.outcomes] == [each.output_tokens for each in LOPSIDED.arrivals]
    return run.span_s, sum(worker.scheduler.num_preemptions for worker in cluster.workers)


def test_answers_move_to_where_there_is_room() -> None:
    (alone_s, alone), (moving_s, moving) = served(Ways()), served(Ways(moves=True))
    assert moving < alone / 2
    assert moving_s < 0.8 * alone_s
