"""Cached pages that are fetched under virtual time: the real router asks, and the real workers send."""

from pdserve.capacity.cluster import SimCluster
from pdserve.capacity.worker import Shape
from pdserve.measure.outcomes import ANY
from pdserve.measure.workload import Arrival, Workload
from pdserve.perfmodel.profile import read_profile, shipped_profile

PROFILE = read_profile(shipped_profile())
# One prompt of 1,600 tokens, and when it has been computed, two at once that go on from it.
BLOCKS = tuple(range(25))
WORKLOAD = Workload(
    "prefix",
    (Arrival(0.0, 1600, 4, BLOCKS), *[Arrival(5.0, 3000, 4, BLOCKS)] * 2),
    block_tokens=64,
    exact=True,
)


def served(*, fetches: bool) -> tuple[float, list[float]]:
    """Return for how long prefill workers computed, and the later times to first token, ascending."""
    cluster = SimCluster(PROFILE, Shape(2, 1, local_prefill=False, fetches=fetches), "goodput", WORKLOAD, ANY)
    run = cluster.run()
    assert all(each.num_tokens == each.output_tokens for each in run.outcomes)
    for worker in cluster.workers:
        worker.scheduler.cache.check()
        assert worker.core.idle
    return sum(worker.busy_s for worker in cluster.workers), sorted(each.ttft_s or 0.0 for each in run.outcomes[-2:])


def test_a_prefix_that_one_prefill_worker_has_is_fetched_by_the_other() -> None:
    (alone_s, alone), (fetching_s, fetching) = served(fetches=False), served(fetches=True)
    assert fetching_s < alone_s
    assert fetching[-1] < 0.9 * alone[-1]
