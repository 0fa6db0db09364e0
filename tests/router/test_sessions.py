"""Turns of a named conversation prefer the workers of the turn before, within what leaving them would cost."""

import pytest
from goodput_cluster import Cluster, placed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from router_driver import LAYOUT

from pdserve.base.ids import WorkerId
from pdserve.protocol.prefix_hash import EVERYONE, CacheScope
from pdserve.router.placement.leaving import MOST_S
from pdserve.router.placement.prefix_index import block_hashes
from pdserve.router.placement.sessions import LIFE_S, Home, Sessions, session_key
from pdserve.router.requests.commands import Command, Place
from pdserve.router.requests.events import ClientGone, DrainAsked, KvChanged, LinkId, LinkLost, PairMeasured

WORKERS = "p0 p1 d0 d1"
PROMPT = tuple(range(1, 3001))


def names(place: Place) -> tuple[str, str]:
    assert place.prefill is not None
    assert place.decode is not None
    return place.prefill.worker_id, place.decode.worker_id


def hold(cluster: Cluster, name: str, num_tokens: int) -> None:
    """Let a worker report that it holds so many leading tokens of the prompt."""
    hasher = cluster.predictor.prefixes.hasher
    blocks = LAYOUT.page_size // hasher.block_tokens
    cluster.post(
        KvChanged(cluster.links[name], stored=block_hashes(hasher, PROMPT[:num_tokens], EVERYONE)[blocks - 1 :: blocks])
    )


def slow_links(cluster: Cluster, bytes_per_s: float = 1e5) -> None:
    """Make links so slow that nothing is fetched, by default."""
    for source in cluster.links:
        for target in cluster.links:
            cluster.post(PairMeasured(cluster.links[source], WorkerId(target), bytes_per_s, "tcp", is_slow=False))


def turn(cluster: Cluster, num_tokens: int = 3000, session: str = "talk", **terms: object) -> Place:
    return placed(cluster.arrive(tokens=list(PROMPT[:num_tokens]), session=session, **terms))


def at_home(cluster: Cluster, computes: str, decode: str, session: str = "talk") -> None:
    """Let a conversation's last turn have been there."""
    home = Home(cluster.links[computes], cluster.links[decode])
    cluster.core.placements.sessions.bind(session_key(CacheScope(""), session), home, cluster.now_s)


def test_a_turn_computes_again_what_its_home_holds_only_where_that_keeps_nobody_waiting() -> None:
    """Another prefill worker is idle, holds 320 tokens fewer, and is used less: a turn leaves for it without a name."""
    for computes, other in (("p0", "p1"), ("p1", "p0")):
        chosen: dict[str, str] = {}
        for session in ("", "talk"):
            cluster = Cluster(workers=WORKERS)
            slow_links(cluster)
            hold(cluster, computes, 2400)
            hold(cluster, other, 2080)
            at_home(cluster, computes, "d0")
            queue(cluster, computes, 1)
            chosen[session] = names(turn(cluster, session=session))[0]
        assert chosen == {"": other, "talk": computes}


def test_an_answer_goes_on_where_most_of_its_conversation_is_though_another_is_sooner() -> None:
    """Sending these pages elsewhere takes 0.05 s; the answer takes 0.1 s longer beside the one that home decodes."""
    for decode, other in (("d0", "d1"), ("d1", "d0")):
        chosen: dict[str, str] = {}
        for session in ("", "talk"):
            cluster = Cluster(workers=WORKERS)
            slow_links(cluster, LAYOUT.sent_bytes(2400) / 0.05)
            hold(cluster, decode, 2400)
            at_home(cluster, "p0", decode)
            cluster.core.placements.workers.known(cluster.links[other]).draining = True
            placed(cluster.arrive(tokens=[30_000] * 100))
            cluster.core.placements.workers.known(cluster.links[other]).draining = False
            chosen[session] = names(turn(cluster, session=session))[1]
        assert chosen == {"": other, "talk": decode}


def queue(cluster: Cluster, name: str, num_prompts: int) -> None:
    """Let prompts of 1,000 tokens wait for a prefill worker."""
    workers = cluster.core.placements.workers
    others = [workers.known(link) for each, link in cluster.links.items() if each[0] == "p" and each != name]
    for number in range(num_prompts):
        for worker in others:
            worker.draining = True
        placed(cluster.arrive(tokens=[10_000 + number] * 1000, max_tokens=1))
        for worker in others:
            worker.draining = False


def home_with_queue(session: str, computes: str = "p0", **terms: object) -> list[Command]:
    """Return what becomes of a turn whose home holds its prompt, behind five others; another worker is idle."""
    cluster = Cluster(workers="p0 p1 d0")
    slow_links(cluster)
    for name in {"p0", computes}:
        hold(cluster, name, 2992)
    at_home(cluster, computes, "d0")
    queue(cluster, "p0", 5)
    return cluster.arrive(tokens=list(PROMPT), session=session, **terms)


def test_a_turn_stays_behind_a_queue_that_costs_less_than_computing_again() -> None:
    """The queue at home takes 0.5 s, the 3,000 tokens elsewhere 0.36 s, and 0.5 s is the most that leaving costs."""
    assert names(placed(home_with_queue("")))[0] == "p1"
    assert names(placed(home_with_queue("talk")))[0] == "p0"


def test_a_worker_that_computed_a_turn_and_now_decodes_is_no_home() -> None:
    for session in ("", "talk"):
        assert names(placed(home_with_queue(session, computes="d0")))[0] == "p1"


def test_a_worker_that_decoded_a_turn_and_now_computes_is_no_home() -> None:
    """The turn goes where one without a name goes."""
    chosen: list[tuple[str, str]] = []
    for session in ("", "talk"):
        cluster = Cluster(workers=WORKERS)
        slow_links(cluster, LAYOUT.sent_bytes(2400) / 0.05)
        for name in ("p0", "d0"):
            hold(cluster, name, 2992)
        at_home(cluster, "p1", "p0")
        queue(cluster, "p0", 5)
        cluster.core.placements.workers.known(cluster.links["d1"]).draining = True
        placed(cluster.arrive(tokens=[30_000] * 100))
        cluster.core.placements.workers.known(cluster.links["d1"]).draining = False
        chosen.append(names(turn(cluster, session=session)))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("ttft_s", [0.5, 0.45, 0.4])
def test_a_turn_leaves_a_home_that_misses_its_objective(ttft_s: float) -> None:
    for session in ("", "talk"):
        assert names(placed(home_with_queue(session, ttft_s=ttft_s)))[0] == "p1"


@settings(max_examples=25, deadline=None)
@given(
    held=st.tuples(*[st.integers(0, 187)] * 4),
    queues=st.lists(st.integers(100, 3000), max_size=8),
    home=st.tuples(st.sampled_from(("p0", "p1")), st.sampled_from(("d0", "d1"))),
    is_slow=st.booleans(),
)
def test_home_is_never_later_than_another_way_by_more_than_the_price(
    held: tuple[int, int, int, int], queues: list[int], home: tuple[str, str], is_slow: bool
) -> None:
    """What is chosen is predicted to be complete at most two prices later than what would be chosen without a name."""
    costs: dict[str, float] = {}
    for session in ("", "talk"):
        cluster = Cluster(workers=WORKERS)
        if is_slow:
            slow_links(cluster)
        for worker, pages in zip(WORKERS.split(), held, strict=True):
            hold(cluster, worker, 16 * pages)
        for number, num_tokens in enumerate(queues):
            placed(cluster.arrive(tokens=[20_000 + number] * num_tokens))
        at_home(cluster, *home)
        place = turn(cluster, session=session)
        ttft_s, tpot_s = cluster.predicted_s(place)
        costs[session] = ttft_s + tpot_s * (cluster.predictor.lengths.expected(100) - 1)
    assert costs["talk"] <= costs[""] + 2 * MOST_S + 1e-6


@settings(max_examples=15, deadline=None)
@given(computes=st.sampled_from(("p0", "p1")), decode=st.sampled_from(("d0", "d1")), drains=st.booleans())
def test_a_lost_or_draining_worker_is_never_chosen(computes: str, decode: str, drains: bool) -> None:
    cluster = Cluster(workers=WORKERS)
    hold(cluster, computes, 2992)
    hold(cluster, decode, 2992)
    at_home(cluster, computes, decode)
    for name in (computes, decode):
        cluster.post(DrainAsked(cluster.links[name]) if drains else LinkLost(cluster.links[name], "gone"))
    assert not set(names(turn(cluster))) & {computes, decode}
    assert cluster.core.placements.sessions.turns == {"gone": 1}


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (None, (1, 2), "new"),
        ((1, 2), (1, 2), "kept"),
        ((1, None), (1, 2), "kept"),
        ((1, 2), (1, 3), "partly"),
        ((1, 2), (3, 2), "partly"),
        ((1, 2), (3, 4), "left"),
    ],
)
def test_turns_are_counted_by_whether_they_kept_to_their_homes(
    before: tuple[int, int | None] | None, after: tuple[int, int], outcome: str
) -> None:
    sessions = Sessions()
    sessions.count(None if before is None else home_of(*before), home_of(*after), is_there=True)
    assert sessions.turns == {outcome: 1}


def home_of(computes: int, decode: int | None) -> Home:
    return Home(LinkId(computes), None if decode is None else LinkId(decode))


def test_a_router_counts_the_turns_that_it_places() -> None:
    cluster = Cluster(workers="p0 d0")
    sessions = cluster.core.placements.sessions
    for tenant, session in (("", "talk"), ("", "talk"), ("", ""), ("other", "talk")):
        turn(cluster, session=session, tenant=tenant)
    assert sessions.turns == {"new": 2, "kept": 1}
    assert len(sessions) == 2


def test_a_conversation_of_another_tenant_or_adapter_is_another_one() -> None:
    keys = {session_key(CacheScope(tenant), name) for tenant in ("", "a", "ab") for name in ("bc", "c", "x")}
    assert len(keys) == 9
    assert session_key(CacheScope("a"), "") == b""


@example([(number, 1.0) for number in range(12)])
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from((0.0, 1.0, LIFE_S / 9, LIFE_S))), max_size=60))
def test_the_table_is_bounded_and_forgets_the_oldest_turn_first(turns: list[tuple[int, float]]) -> None:
    sessions, now_s, last = Sessions(max_sessions=8), 0.0, dict[bytes, float]()
    for number, gap_s in turns:
        now_s += gap_s
        key = session_key(CacheScope(), str(number))
        sessions.bind(key, Home(LinkId(number), None), now_s)
        last.pop(key, None)
        last[key] = now_s
        assert len(sessions) <= 8
    known = {key for key in last if sessions.home(key, now_s) is not None}
    recent = [key for key, at_s in last.items() if at_s + LIFE_S > now_s][-8:]
    assert known == set(recent)


def test_a_moved_answer_takes_its_conversation_along() -> None:
    sessions, key = Sessions(), session_key(CacheScope(), "talk")
    sessions.bind(key, Home(LinkId(1), LinkId(2)), 0.0)
    sessions.move(key, LinkId(3))
    assert sessions.home(key, 1.0) == Home(LinkId(1), LinkId(3))
    sessions.move(session_key(CacheScope(), "other"), LinkId(3))
    assert len(sessions) == 1


@pytest.mark.parametrize("number", range(5))
def test_home_is_looked_at_among_many_workers(number: int) -> None:
    workers = " ".join([*(f"p{place}" for place in range(20)), *(f"d{place}" for place in range(20))])
    cluster = Cluster(workers=workers)
    cluster.count = number  # requests draw other workers
    slow_links(cluster)
    for name in cluster.links:
        hold(cluster, name, 1600)
    hold(cluster, "p3", 1616)
    at_home(cluster, "p3", "d3")
    assert names(turn(cluster))[0] == "p3"


def test_a_long_queue_is_left_whatever_is_cached_behind_it() -> None:
    cluster = Cluster(workers="p0 d0")
    hold(cluster, "p0", 2992)
    at_home(cluster, "p0", "d0")
    for number in range(20):  # 0.1 s each, and 0.3 s to compute the turn elsewhere
        placed(cluster.arrive(tokens=[10_000 + number] * 1000, max_tokens=1))
    cluster.attach("p1")
    slow_links(cluster)
    assert names(turn(cluster))[0] == "p1"


def test_a_preparation_is_no_demand_and_what_it_brings_counts_once_it_is_there() -> None:
    cluster = Cluster(workers="p0 d0")
    at_home(cluster, "p0", "d0")
    tokens, talk = list(PROMPT), session_key(CacheScope(""), "talk")
    place = placed(cluster.arrive(tokens=tokens, max_tokens=1, session="talk", is_preparation=True, priority=-5))
    assert place.decode is None
    placements = cluster.core.placements
    assert placements.demand.counted().num_requests == 0
    assert not placements.sessions.turns
    assert placements.sessions.home(talk, 0.0) == Home(cluster.links["p0"], cluster.links["d0"])
    hashes = block_hashes(cluster.predictor.prefixes.hasher, PROMPT, EVERYONE)
    assert cluster.predictor.prefixes.match(hashes, cluster.now_s) == {}
    cluster.post(ClientGone(place.spec.request_id))
    assert not placements.ended
    assert not placements.recent.ended
    assert placements.num_ended == 1
