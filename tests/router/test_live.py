"""What a router keeps of what happened lately, and shows to whoever watches."""

import asyncio
import time
from typing import Any

from router_driver import LENGTH, Driver, placed_request
from router_fakes import StartRouter
from scraping import snapshot

from pdserve.base.roles import Role
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.reports import Failure, ReportedLoad, Stage
from pdserve.router.config import Limits
from pdserve.router.frontend.backend import MAX_OF_STAGE, State
from pdserve.router.live import Live, Shown
from pdserve.router.requests.commands import Warn
from pdserve.router.requests.events import ClientGone, DrainAsked, LinkLost, LoadReported
from pdserve.router.requests.recent import MAX_ENDED, MAX_HAPPENINGS, MAX_SECONDS, Kind, Recent

UNIX_S = 1_000_000.0


def seen(d: Driver) -> State:
    return Live(d.core, admin.ClusterStatus, 0.0).state(d.now_s, UNIX_S + d.now_s)


def found(d: Driver, name: str) -> Shown | None:
    return Live(d.core, admin.ClusterStatus, 0.0).request(name, d.now_s, UNIX_S + d.now_s)


def entries(d: Driver, section: str) -> list[Any]:
    return list(seen(d)[section].values())


def stage_seen(d: Driver) -> str:
    (request,) = entries(d, "requests")
    assert seen(d)["facts"]["stages"] == {request["stage"]: 1}
    return str(request["stage"])


def kinds(d: Driver) -> list[tuple[str, str]]:
    return [(happening["kind"], happening["subject"]) for happening in entries(d, "happenings")]


def test_a_request_is_seen_to_pass_from_queue_to_prefill_to_hand_off_to_decode() -> None:
    d, p, q, request = placed_request()
    assert stage_seen(d) == "queue"
    d.stage(p, request, Stage.PREFILL_STARTED)
    assert stage_seen(d) == "prefill"
    d.tokens(p, request, 0, 7)
    assert stage_seen(d) == "handoff"
    d.stage(q, request, Stage.COMMITTED)
    assert stage_seen(d) == "decode"
    (running,) = entries(d, "requests")
    assert (running["prompt_tokens"], running["answer_tokens"]) == (3, 1)
    assert (running["prefill_worker"], running["decode_worker"]) == ("p0", "d0")
    d.tokens(q, request, 1, 8, 9, 10, end=LENGTH)
    assert not seen(d)["requests"]
    (ended,) = entries(d, "ended")
    assert (ended["request_id"], ended["status"]) == (request.hex(), "OK")
    assert (ended["prompt_tokens"], ended["completion_tokens"], ended["passed"][-1]) == (3, 4, "finished")
    known = found(d, request.hex())
    assert known is not None
    assert known["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0}
    assert known["ledger"]["steps"][0] == {"name": "received", "at_ms": 0.0}


def test_a_request_whose_worker_is_lost_is_seen_in_the_queue_again() -> None:
    d, p, _, request = placed_request()
    d.stage(p, request, Stage.PREFILL_STARTED)
    d.post(LinkLost(p, "its stream ended"))
    assert stage_seen(d) == "queue"


def test_looking_at_a_timeline_leaves_it_as_it_is() -> None:
    ledgers = []
    for is_watched in (False, True):
        d = Driver()
        p, q = d.pair()
        request = d.arrive()
        d.now_s += 1.0
        d.stage(p, request, Stage.PREFILL_QUEUED, age_s=0.2)
        d.stage(p, request, Stage.PREFILL_STARTED, age_s=0.5)  # out of order: the later report bounds the earlier
        if is_watched:
            seen(d)
        d.stage(p, request, Stage.PREFILL_STARTED, age_s=0.1)
        d.tokens(p, request, 0, 7)
        d.tokens(q, request, 1, 8, 9, 10, end=LENGTH)
        ledgers.append(d.answer(request).ledger)
    assert ledgers[0] == ledgers[1]


def test_what_has_not_changed_is_shown_as_before_though_clocks_jitter() -> None:
    d = Driver()
    d.pair()
    d.post(ClientGone(d.arrive()))
    d.arrive()
    live = Live(d.core, admin.ClusterStatus, 0.0)
    states = [live.state(d.now_s, UNIX_S + d.now_s + jitter_s) for jitter_s in (0.0, 0.001)]
    assert {**states[0], "clock": {}} == {**states[1], "clock": {}}
    assert states[0]["clock"] != states[1]["clock"]
    set_right = live.state(d.now_s, UNIX_S + d.now_s + 3600.0)
    assert set_right["happenings"] != states[0]["happenings"]
    assert set_right["ended"] == states[0]["ended"], "what has ended is not made again"


def test_roles_drains_and_returns_are_noted_once_each() -> None:
    d = Driver()
    p = d.attach("p0")
    d.post(LoadReported(p, ReportedLoad(100, role=Role.MIXED, role_epoch=1)))
    d.post(LoadReported(p, ReportedLoad(100, role=Role.MIXED, role_epoch=1)))
    d.post(DrainAsked(p))
    d.post(LoadReported(p, ReportedLoad(100, draining=True)))
    d.post(LoadReported(p, ReportedLoad(100, draining=False)))
    attached = [("attached", "p0"), ("ready", "p0")]
    assert kinds(d) == [*attached, ("role", "p0"), ("drain", "p0"), ("drain", "p0")]
    assert [each["text"] for each in entries(d, "happenings")][2:] == [
        "from prefill to mixed",
        "drains: takes no more requests",
        "takes requests again",
    ]


def test_a_refusal_without_objectives_is_counted_as_missed_and_judged_by_nothing() -> None:
    d = Driver()
    d.arrive()
    d.run(60.0)
    (counted,) = entries(d, "seconds")
    assert counted[1:4] == [1, 1, 0]


def test_times_are_shown_on_the_clock_of_the_world() -> None:
    d = Driver()
    d.pair()
    attached_s = d.now_s
    d.now_s += 100.0
    assert entries(d, "happenings")[0]["unix_time_ms"] == (UNIX_S + attached_s) * 1e3


def test_what_is_kept_is_bounded_and_holds_no_token() -> None:
    d = Driver()
    d.pair()
    for _ in range(MAX_ENDED + 10):
        request = d.arrive(prompt=(987654, 2, 3))
        d.post(ClientGone(request))
        d.now_s += 1.5
    recent = d.core.placements.recent
    assert (len(recent.ended), len(recent.seconds)) == (MAX_ENDED, min(MAX_SECONDS, MAX_ENDED + 10))
    assert "987654" not in str(seen(d))
    for number in range(MAX_HAPPENINGS + 10):
        recent.note(Kind.WARNING, "", str(number))
    assert len(recent.happenings) == MAX_HAPPENINGS


def test_what_repeats_itself_at_once_is_one_entry_with_a_count() -> None:
    recent = Recent()
    for _ in range(3):
        recent.note(Kind.MOVE, "d0", "a sequence moves to d1: done")
    (happening,) = recent.happenings
    assert (happening.key, happening.count) == (1, 3)
    recent.now_s = 60.0
    recent.note(Kind.MOVE, "d0", "a sequence moves to d1: done")
    assert [each.count for each in recent.happenings] == [3, 1]


def test_the_newest_requests_of_each_stage_are_shown_and_all_are_counted() -> None:
    d = Driver(Limits(max_num_requests=50))
    p, _ = d.pair()
    arrived = [d.arrive() for _ in range(200)]
    for request in arrived[:50]:
        d.stage(p, request, Stage.PREFILL_STARTED)
    assert list(seen(d)["requests"]) == [
        each.hex() for each in [*arrived[50 - MAX_OF_STAGE : 50], *arrived[-MAX_OF_STAGE:]]
    ]
    assert seen(d)["facts"]["stages"] == {"prefill": 50, "queue": 150}


def test_each_tenant_sees_its_own_newest_requests() -> None:
    d = Driver()
    d.pair()
    first = d.arrive(tenant="a")
    for _ in range(100):
        d.arrive(tenant="b")
    assert seen(d)["requests"][first.hex()]["tenant"] == "a"


def test_a_request_is_found_whether_it_is_shown_in_the_list_or_not() -> None:
    d = Driver(Limits(max_num_requests=1))
    d.pair()
    placed, held = d.arrive(), [d.arrive() for _ in range(100)]
    assert held[0].hex() not in seen(d)["requests"]
    for request in (placed, *held):
        known = found(d, request.hex())
        assert known is not None
        assert known["request_id"] == request.hex()
        assert "status" not in known
    assert found(d, "00") is found(d, "no id") is None


def test_a_warning_that_names_a_request_is_not_for_watchers() -> None:
    d = Driver()
    p, _ = d.pair()
    for failure in (Failure.INTERNAL, Failure.INVALID):
        d.fail(p, d.arrive(), failure)
        (warning,) = [command for command in d.last if isinstance(command, Warn)]
        assert warning.names_request


def test_pages_of_a_worker_are_shown_so_that_they_add_up() -> None:
    status = admin.ClusterStatus(
        workers=[
            admin.WorkerStatus(
                registration=link.Register(worker_id="p0", ready=True, num_pages=100, role=link.ROLE_PREFILL),
                load=link.Heartbeat(pages_free=90, pages_cached=40, pages_held=7, pages_granted=3),
            )
        ]
    )
    d = Driver()
    worker = Live(d.core, lambda: status, 0.0).state(d.now_s, UNIX_S)["workers"]["p0"]
    assert worker["pages"] == {"held": 7, "granted": 3, "cached": 40, "quarantined": 0, "free": 50}
    assert sum(worker["pages"].values()) == worker["num_pages"]


async def test_what_the_autoscaler_decided_is_shown_beside_the_workers(start_router: StartRouter) -> None:
    router = await start_router(http_port=0)
    worker = await router.worker(link.ROLE_PREFILL, "p0")
    await router.until_status(lambda status: len(status.workers) == 1)
    before_ms = time.time() * 1e3
    decided = admin.ReportDecisionsRequest(decisions=["decode: add decode-1; binds: step time"])
    await router.admin.ReportDecisions(decided, metadata=await router.proof("ReportDecisions"))
    shown = await asyncio.to_thread(snapshot, router.addresses.http)
    happened = list(shown["happenings"].values())
    assert [(each["kind"], each["subject"]) for each in happened] == [
        ("attached", worker.name),
        ("ready", worker.name),
        ("scaling", ""),
    ]
    assert happened[-1]["text"] == "decode: add decode-1; binds: step time"
    assert before_ms - 1 <= happened[-1]["unix_time_ms"] <= time.time() * 1e3 + 1
    assert 0 < shown["clock"]["uptime_ms"] < 600_000
    assert list(shown["workers"]) == [worker.name]
