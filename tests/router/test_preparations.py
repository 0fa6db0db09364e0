"""Preparations of next turns take nothing from requests that clients wait for, and teach the router nothing of them."""

from goodput_cluster import Cluster, placed, refused
from router_driver import Delta, Driver

from pdserve.base.ids import RequestId
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.protocol.refusal import Cause
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.config import Limits
from pdserve.router.frontend.next_turns import LOWEST_PRIORITY
from pdserve.router.placement.sessions import Home, session_key
from pdserve.router.requests.commands import Place
from pdserve.router.requests.events import LinkId, RequestArrived, StepReported


def prepare(cluster: Cluster, **terms: object) -> Place:
    return placed(cluster.arrive(max_tokens=1, is_preparation=True, priority=LOWEST_PRIORITY, **terms))


def finish(cluster: Cluster, place: Place) -> None:
    assert place.prefill is not None
    link = cluster.links[place.prefill.worker_id]
    cluster.post(StepReported(link, [Delta(place.spec.request_id, 0, 0, 0, (7,), 2)]))


def asked(d: Driver, number: int, *, is_preparation: bool) -> RequestId:
    """Let a request of one token come."""
    request_id, priority = RequestId(number.to_bytes(16)), LOWEST_PRIORITY if is_preparation else 100
    terms = request_id, (5, 6, 7), SamplingParams(max_tokens=1), d.now_s, d.now_s + 60, priority
    d.post(RequestArrived(*terms, is_preparation=is_preparation))
    return request_id


def test_preparations_teach_nothing_of_answers_and_of_predictions() -> None:
    cluster = Cluster()
    predictor, lengths = cluster.predictor, cluster.predictor.lengths
    ttft, median = predictor.ttft_margin.factor, predictor.ttft_median
    before = lengths.mean_tokens, lengths.expected(100), lengths.overdue_tokens
    for _ in range(30):
        place = prepare(cluster)
        cluster.now_s += 5
        finish(cluster, place)
    assert cluster.core.placements.num_ended == 30
    assert (lengths.mean_tokens, lengths.expected(100), lengths.overdue_tokens) == before
    assert (predictor.ttft_margin.factor, predictor.ttft_median) == (ttft, median)


def test_preparations_keep_no_request_waiting_for_a_place() -> None:
    d = Driver(Limits(max_num_requests=4))
    d.pair()
    for number in range(4):
        asked(d, number, is_preparation=True)
        assert d.placed()
    assert (d.core.num_active, d.core.placements.num_asked) == (4, 0)
    for number in range(4, 8):
        asked(d, number, is_preparation=False)
        assert d.placed()
    asked(d, 8, is_preparation=False)
    assert (d.core.placements.num_asked, d.core.num_held) == (4, 1)


def test_a_preparation_is_not_charged_to_its_tenants_turn() -> None:
    d = Driver()
    d.pair()
    asked(d, 1, is_preparation=True)
    (request,) = d.core.requests()
    assert request.counter.served == 0
    asked(d, 2, is_preparation=False)
    assert request.counter.served == 3


def test_a_preparation_never_waits() -> None:
    d = Driver(Limits(max_num_requests=1))
    d.pair()
    asked(d, 1, is_preparation=False)
    late = asked(d, 2, is_preparation=True)
    assert d.refusal(late).cause is Cause.SLOTS
    assert d.core.num_held == 0
    asked(d, 3, is_preparation=False)
    late = asked(d, 4, is_preparation=True)
    assert d.refusal(late).cause is Cause.SLOTS
    assert d.core.num_held == 1, "the request alone"


def test_a_preparation_without_workers_does_not_wake_a_pool() -> None:
    d = Driver(Limits(scale_to_zero=True))
    late = asked(d, 1, is_preparation=True)
    assert d.refusal(late)
    assert d.core.num_held == 0


def test_a_preparation_that_comes_after_its_turn_moves_no_home() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    sessions, talk = cluster.core.placements.sessions, session_key(CacheScope(""), "talk")
    place = placed(cluster.arrive(session="talk"))
    assert place.prefill is not None
    home = Home(cluster.links[place.prefill.worker_id], cluster.links["d0"])
    other = prepare(cluster, session="talk", tokens=[99] * 50).prefill
    assert other is not None
    assert cluster.links[other.worker_id] != home.computes
    assert sessions.home(talk, cluster.now_s) == home


def test_a_preparation_whose_objective_is_missed_is_refused() -> None:
    cluster = Cluster(workers="p0 d0")
    for number in range(30):
        placed(cluster.arrive(tokens=[50 + number] * 1000, max_tokens=1))
    terms = {"max_tokens": 1, "is_preparation": True, "priority": LOWEST_PRIORITY, "ttft_s": 2.0}
    assert refused(cluster.arrive(**terms)).cause is Cause.QUEUE  # type: ignore[arg-type]


def test_a_turn_that_left_its_prefill_worker_kept_nothing_where_no_decode_worker_was_known() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    sessions = cluster.core.placements.sessions
    sessions.count(Home(LinkId(1), None), Home(LinkId(3), LinkId(2)), is_there=True)
    assert sessions.turns == {"left": 1}
