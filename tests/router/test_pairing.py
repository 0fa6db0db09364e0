"""The way between two workers counts in the choice of both."""

from collections import Counter

from goodput_cluster import LAYOUT, Cluster, placed

from pdserve.base.ids import WorkerId
from pdserve.router.placement.predict import Prompt
from pdserve.router.requests.commands import Place
from pdserve.router.requests.events import PairMeasured


def measured(cluster: Cluster, prefill: str, decode: str, bytes_per_s: float) -> None:
    cluster.post(PairMeasured(cluster.links[prefill], WorkerId(decode), bytes_per_s, "tcp", is_slow=False))


def pairs_of(cluster: Cluster, count: int) -> Counter[tuple[str, str]]:
    """Place requests one after the other, each once the prompt before it is computed."""
    pairs: Counter[tuple[str, str]] = Counter()
    for _ in range(count):
        place: Place = placed(cluster.arrive(200, max_tokens=20))
        assert place.prefill is not None
        assert place.decode is not None
        pairs[place.prefill.worker_id, place.decode.worker_id] += 1
        for worker in cluster.core.workers:
            for key in worker.shares:
                worker.prefilled(key)
    return pairs


def test_a_pair_with_a_slow_way_is_not_chosen_where_there_is_another() -> None:
    cluster = Cluster(workers="p0 d0 d1")
    measured(cluster, "p0", "d0", 1e9)
    measured(cluster, "p0", "d1", 1e3)
    assert pairs_of(cluster, 20) == {("p0", "d0"): 20}


def test_the_prefill_worker_is_chosen_whose_way_to_some_decode_worker_is_short() -> None:
    cluster = Cluster(workers="p0 p1 d0 d1")
    for decode in ("d0", "d1"):
        measured(cluster, "p0", decode, 1e3)
        measured(cluster, "p1", decode, 1e9)
    assert {prefill for prefill, _ in pairs_of(cluster, 20)} == {"p1"}


def test_over_slow_ways_a_request_goes_where_leading_pages_are() -> None:
    cluster = Cluster(workers="p0 d0 d1 d2")
    for decode in ("d0", "d1", "d2"):
        measured(cluster, "p0", decode, 1e5)
    prefix = list(range(2048))
    home = placed(cluster.arrive(tokens=[*prefix, 1])).decode
    for turn in range(3):
        assert placed(cluster.arrive(tokens=[*prefix, 2 + turn])).decode == home


def test_a_slow_way_is_not_done_when_the_last_chunk_is() -> None:
    cluster = Cluster()
    prefill, decode = cluster.core.workers
    measured(cluster, "p0", "d0", 1e5)
    prompt = Prompt(3000, 1, {})
    token_bytes = LAYOUT.page_bytes / LAYOUT.page_size
    whole_s, compute_s = 3000 * token_bytes / 1e5, 2000 * cluster.predictor.costs.of(prefill).prefill.each_s
    (handoff_s,) = cluster.predictor.handoffs_s(prefill, [decode], prompt, 0)
    assert whole_s - compute_s < handoff_s <= whole_s
    held = Prompt(3000, 1, {decode.link: 2900})
    assert cluster.predictor.handoffs_s(prefill, [decode], held, 0) < [0.05 * whole_s]
