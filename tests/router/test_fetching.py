"""Leading pages of a prompt are fetched from a worker that holds more of them where that beats computing."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from goodput_cluster import LAYOUT, Cluster, placed, refused

from pdserve.base.ids import WorkerId
from pdserve.protocol.prefix_hash import EVERYONE
from pdserve.protocol.reports import ReportedLoad, Stage
from pdserve.router import wire
from pdserve.router.placement.prefix_index import block_hashes
from pdserve.router.requests.commands import Place
from pdserve.router.requests.events import KvChanged, LinkLost, LoadReported, PairMeasured, StageReached

TOKEN_BYTES = LAYOUT.page_bytes / LAYOUT.page_size
PROMPT = tuple(range(1, 3001))
HELD = 2992  # full pages before the last token
COMPUTE_S = 0.02 * 2 + 1e-4 * HELD  # three steps become one


def hold(cluster: Cluster, name: str, num_tokens: int = HELD, prompt: Sequence[int] = PROMPT) -> None:
    """Let a worker report that it holds so many leading tokens."""
    hasher = cluster.predictor.prefixes.hasher
    blocks = LAYOUT.page_size // hasher.block_tokens
    hashes = block_hashes(hasher, prompt[:num_tokens], EVERYONE)
    cluster.post(KvChanged(cluster.links[name], stored=hashes[blocks - 1 :: blocks]))


def measured(cluster: Cluster, source: str, target: str, seconds: float) -> None:
    """Let a worker report a link that carries the held tokens in so many seconds."""
    rate = HELD * TOKEN_BYTES / seconds
    cluster.post(PairMeasured(cluster.links[source], WorkerId(target), rate, "tcp", is_slow=False))


def fetched(cluster: Cluster, place: Place, num_tokens: int) -> None:
    """Let the worker that computes the prompt report that its fetch is over."""
    assert place.prefill is not None
    spec = place.spec
    cluster.post(
        StageReached(place.prefill.link, spec.request_id, spec.attempt, Stage.FETCHED, 0.0, cached_tokens=num_tokens)
    )


def decision(cluster: Cluster, place: Place) -> str:
    return cluster.core.placements.requests[place.spec.request_id].ledger.decision


def ask(cluster: Cluster, prompt: Sequence[int] = PROMPT, **terms: object) -> Place:
    return placed(cluster.arrive(tokens=list(prompt), **terms))  # type: ignore[arg-type]


def turns(cluster: Cluster, holder: str) -> Iterator[Place]:
    """Place prompts that differ, each held by a worker, one after the other."""
    for number in range(100):
        prompt = (number, *PROMPT[1:])
        hold(cluster, holder, prompt=prompt)
        yield ask(cluster, prompt)


def queue(cluster: Cluster, num_tokens: int) -> None:
    for _ in range(num_tokens // 1000):
        placed(cluster.arrive(1000))


def test_pages_are_fetched_where_that_is_quicker_than_computing() -> None:
    cluster = Cluster()
    hold(cluster, "d0")
    measured(cluster, "d0", "p0", 0.012)
    place = ask(cluster)
    assert place.fetch is not None
    assert (place.fetch.holder.worker_id, place.fetch.num_tokens) == ("d0", HELD)
    assert place.fetch.within_s == pytest.approx(COMPUTE_S, rel=0.05)
    assert "fetches 2,992 of 3,000 tokens from d0: 13 ms against 3" in decision(cluster, place)
    assert cluster.core.workers.known(cluster.links["p0"]).pending_prefill_tokens == 3000 - HELD
    assert cluster.predicted_s(place)[0] == pytest.approx(0.013 + 0.02 + 8e-4, rel=0.05)
    assert cluster.core.placements.requests[place.spec.request_id].ledger.fetched_from == "d0"


def test_over_a_slow_link_the_prompt_is_computed_and_the_ledger_says_why() -> None:
    cluster = Cluster()
    hold(cluster, "d0")
    measured(cluster, "d0", "p0", 0.4)
    place = ask(cluster)
    assert place.fetch is None
    assert "computes, and does not fetch 2,992 of 3,000 tokens from d0: 401 ms against 3" in decision(cluster, place)
    assert cluster.core.workers.known(cluster.links["p0"]).pending_prefill_tokens == 3000


def test_of_an_unknown_link_the_way_back_is_taken_for_it() -> None:
    for back_s, fetches in ((None, True), (0.01, True), (3.0, False)):
        cluster = Cluster()
        hold(cluster, "d0")
        if back_s is not None:
            measured(cluster, "p0", "d0", back_s)
        assert (ask(cluster).fetch is not None) is fetches


@pytest.mark.parametrize(("num_tokens", "fetches"), [(16, False), (160, True)])
def test_a_few_tokens_are_computed_sooner_than_fetched(num_tokens: int, fetches: bool) -> None:
    cluster = Cluster()
    hold(cluster, "d0", num_tokens)
    cluster.predictor.fetches.observe(("d0", "p0"), 1.0, 0.005, cluster.now_s)  # the last one's messages took 5 ms
    assert (ask(cluster).fetch is not None) is fetches


def test_a_transfer_costs_nothing_while_other_prompts_are_computed() -> None:
    idle, busy, without = (Cluster() for _ in range(3))
    for cluster in (idle, busy):
        hold(cluster, "d0")
        measured(cluster, "d0", "p0", 0.35)
    assert ask(idle).fetch is None
    for cluster in (busy, without):
        queue(cluster, 8000)
    place = ask(busy)
    assert place.fetch is not None
    saved_s = without.predicted_s(ask(without))[0] - busy.predicted_s(place)[0]
    assert saved_s == pytest.approx(COMPUTE_S, rel=0.15)
    assert place.fetch.within_s > 0.8 + COMPUTE_S  # nobody waits for it while others are computed


def test_a_decode_worker_that_holds_the_prompt_computes_the_rest_where_transfer_is_slow() -> None:
    cluster = Cluster(local=True)
    hold(cluster, "d0")
    measured(cluster, "d0", "p0", 0.4)
    place = ask(cluster)
    assert (place.prefill, place.fetch) == (None, None)
    assert "on d0 itself" in decision(cluster, place)


def test_nothing_is_fetched_for_a_worker_that_holds_as_much() -> None:
    cluster = Cluster()
    for name in ("p0", "d0"):
        hold(cluster, name)
    place = ask(cluster)
    assert place.fetch is None
    assert "fetch" not in decision(cluster, place)


def test_nothing_is_fetched_from_a_worker_that_drains() -> None:
    cluster = Cluster(workers="p0 d0 d1")
    hold(cluster, "d1")
    cluster.post(LoadReported(cluster.links["d1"], ReportedLoad(1000, draining=True)))
    assert ask(cluster).fetch is None


@pytest.mark.parametrize("changes", [{"page_size": 2 * LAYOUT.page_size}, {"dtype": "int8"}], ids=str)
def test_another_layout_cannot_be_fetched(changes: dict[str, Any]) -> None:
    cluster = Cluster(workers="p0 d0 p1 d1")
    for name in ("p1", "d1"):
        worker = cluster.core.workers.known(cluster.links[name])
        cluster.post(replace(worker.registration, layout=replace(LAYOUT, **changes)))
    for place in islice(turns(cluster, "d1"), 4):
        assert place.prefill is not None
        assert (place.fetch is not None) is (place.prefill.worker_id == "p1")


def test_what_was_only_routed_to_a_worker_is_not_fetched_from_it() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    first = ask(cluster)
    assert first.prefill is not None
    queue(cluster, 4000)
    assert ask(cluster).fetch is None


def test_of_several_holders_the_one_is_asked_whose_pages_bring_most() -> None:
    cluster = Cluster(workers="p0 d0 d1 d2")
    hold(cluster, "d0")
    hold(cluster, "d1")
    hold(cluster, "d2", 160)
    for name, seconds in (("d0", 0.2), ("d1", 0.02), ("d2", 0.001)):
        measured(cluster, name, "p0", seconds)
    place = ask(cluster)
    assert place.fetch is not None
    assert place.fetch.holder.worker_id == "d1"


def test_a_prefill_worker_sends_to_another_one_that_is_less_busy() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    hold(cluster, "p0")
    places = [placed(cluster.arrive(2000)) for _ in range(4)]
    for place in places:
        assert place.prefill is not None
        if place.prefill.worker_id == "p1":
            worker = cluster.core.workers.known(place.prefill.link)
            worker.prefilled((place.spec.request_id, place.spec.attempt))
    place = ask(cluster)
    assert place.prefill is not None
    assert place.fetch is not None
    assert (place.prefill.worker_id, place.fetch.holder.worker_id) == ("p1", "p0")


def test_a_request_is_admitted_that_only_a_fetch_brings_in_time() -> None:
    cluster = Cluster()
    refused(cluster.arrive(tokens=PROMPT, ttft_s=0.15))
    hold(cluster, "d0")
    measured(cluster, "d0", "p0", 0.05)
    assert ask(cluster, ttft_s=0.15).fetch is not None


def test_tokens_that_did_not_come_are_charged_to_the_worker_that_computes_them() -> None:
    cluster = Cluster()
    hold(cluster, "d0")
    place, worker = ask(cluster), cluster.core.workers.known(cluster.links["p0"])
    fetched(cluster, place, 1600)
    assert worker.pending_prefill_tokens == 1400
    ledger = cluster.core.placements.requests[place.spec.request_id].ledger
    assert ledger.fetched_tokens == 1600
    worker.prefilled((place.spec.request_id, place.spec.attempt))
    assert (worker.pending_prefill_tokens, worker.pending_prefill_work) == (0, 0)


def test_a_pair_whose_fetches_do_not_come_is_left_alone_for_a_while() -> None:
    cluster = Cluster(workers="p0 d0")
    measured(cluster, "d0", "p0", 0.1)
    num_tried, coming = 0, turns(cluster, "d0")
    for place in islice(coming, 6):
        num_tried += place.fetch is not None
        if place.fetch is not None:
            fetched(cluster, place, 0)
        worker = cluster.core.workers.known(cluster.links["p0"])
        worker.prefilled((place.spec.request_id, place.spec.attempt))
    assert num_tried in (1, 2)
    cluster.now_s += 600
    assert next(coming).fetch is not None


def test_a_pair_whose_fetches_come_late_is_taken_to_be_slow() -> None:
    cluster = Cluster(workers="p0 d0")
    for place in islice(turns(cluster, "d0"), 5):
        if place.fetch is None:
            break
        cluster.now_s += 0.5
        fetched(cluster, place, HELD)
        worker = cluster.core.workers.known(cluster.links["p0"])
        worker.prefilled((place.spec.request_id, place.spec.attempt))
    else:
        pytest.fail("it goes on fetching what takes longer than computing")


def test_the_holder_is_sent_the_tokens_and_where_they_go() -> None:
    cluster = Cluster()
    hold(cluster, "d0")
    place = ask(cluster)
    messages = wire.messages(place)
    job = next(m.place for link, m in messages if m.HasField("place") and link == cluster.links["p0"])
    ((link, share),) = [(link, m.share) for link, m in messages if m.HasField("share")]
    assert link == cluster.links["d0"]
    assert (job.fetch.holder.worker_id, job.fetch.num_tokens) == ("d0", HELD)
    assert share.target.worker_id == "p0"
    assert len(share.token_ids) == 4 * HELD
    assert share.within_ms == job.fetch.within_ms > 0
    assert (share.request_id, share.attempt) == (place.spec.request_id, place.spec.attempt)


def test_nothing_is_learnt_of_a_holder_that_has_left() -> None:
    cluster = Cluster(workers="p0 d0 d1")
    hold(cluster, "d0")
    measured(cluster, "d0", "p0", 0.012)
    measured(cluster, "p0", "d0", 5.0)
    place = ask(cluster)
    assert place.fetch is not None
    cluster.post(LinkLost(cluster.links["d0"], "died"))
    fetched(cluster, place, 0)
    expected = cluster.predictor.fetches.expected
    assert expected(("d0", "p0"), cluster.now_s) == expected(("somebody", "p0"), cluster.now_s)


def test_a_mixed_worker_that_fetches_is_not_predicted_to_compute() -> None:
    cluster = Cluster(workers="m0 d0")
    hold(cluster, "d0")
    measured(cluster, "d0", "m0", 0.012)
    place = ask(cluster)
    assert place.fetch is not None
    assert cluster.predicted_s(place)[0] == pytest.approx(0.013 + 0.02 + 8e-4, rel=0.05)
