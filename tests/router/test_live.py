"""What a router keeps of what happened lately, and shows to whoever watches."""

import time

from router_driver import LENGTH, Driver, placed_request
from router_fakes import StartRouter

from pdserve.ids import RequestId
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.reports import Failure, ReportedLoad, Stage
from pdserve.roles import Role
from pdserve.router.commands import Warn
from pdserve.router.config import Limits
from pdserve.router.events import ClientGone, DrainAsked, LinkLost, LoadReported
from pdserve.router.live import MAX_OF_STAGE, live, running
from pdserve.router.recent import MAX_ENDED, MAX_HAPPENINGS, MAX_SECONDS, Kind, Recent

UNIX_S = 1_000_000.0


def seen(d: Driver, after: int = 0) -> admin.GetLiveResponse:
    return live(d.core, admin.ClusterStatus(), after, d.now_s, UNIX_S + d.now_s)


def stage_seen(d: Driver) -> str:
    (request,) = seen(d).requests
    assert dict(seen(d).stages) == {request.stage: 1}
    return request.stage


def kinds(d: Driver) -> list[tuple[str, str]]:
    return [(happening.kind, happening.subject) for happening in seen(d).happenings]


def test_a_request_is_seen_to_pass_from_queue_to_prefill_to_hand_off_to_decode() -> None:
    d, p, q, request = placed_request()
    assert stage_seen(d) == "queue"
    d.stage(p, request, Stage.PREFILL_STARTED)
    assert stage_seen(d) == "prefill"
    d.tokens(p, request, 0, 7)
    assert stage_seen(d) == "handoff"
    d.stage(q, request, Stage.COMMITTED)
    assert stage_seen(d) == "decode"
    (running,) = seen(d).requests
    assert (running.prompt_tokens, running.answer_tokens, running.decode_worker) == (3, 1, "d0")
    assert running.ledger.prefill_worker == "p0"
    d.tokens(q, request, 1, 8, 9, 10, end=LENGTH)
    assert not seen(d).requests
    (ended,) = seen(d).ended
    assert (ended.request_id, ended.status) == (request.hex(), "OK")
    assert (ended.usage.prompt_tokens, ended.usage.completion_tokens) == (3, 4)
    assert [step.name for step in ended.ledger.steps][-1] == "finished"


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


def test_only_what_came_since_the_last_look_is_shown_again() -> None:
    d = Driver()
    d.pair()
    first = seen(d)
    assert len(first.happenings) == 4
    assert not seen(d, first.number).happenings
    d.attach("d1")
    assert [happening.subject for happening in seen(d, first.number).happenings] == ["d1", "d1"]


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
    assert [h.text for h in seen(d).happenings][2:] == [
        "from prefill to mixed",
        "drains: takes no more requests",
        "takes requests again",
    ]


def test_a_refusal_is_shown_with_its_cause_and_a_client_that_left_counts_for_nothing() -> None:
    d = Driver()
    refused = d.arrive(ttft_s=1.0)
    d.run(30.0)
    d.pair()
    d.now_s += 2.0
    d.post(ClientGone(d.arrive()))
    first, second = seen(d).ended
    assert (first.request_id, first.status, first.because) == (refused.hex(), "UNAVAILABLE", "no_prefill")
    assert first.message
    assert first.slo.ttft_ms == 1000
    assert (second.status, second.because) == ("CANCELLED", "")
    assert (first.met, first.HasField("met"), second.HasField("met")) == (False, True, False)
    counted = [(s.num_ended, s.num_missed, s.num_judged, s.num_met) for s in seen(d).seconds]
    assert counted == [(1, 1, 1, 0), (0, 0, 0, 0)]


def test_a_refusal_without_objectives_is_counted_as_missed_and_judged_by_nothing() -> None:
    d = Driver()
    d.arrive()
    d.run(60.0)
    (counted,) = seen(d).seconds
    assert (counted.num_ended, counted.num_missed, counted.num_judged) == (1, 1, 0)


def test_every_second_that_changed_since_the_last_look_is_shown_and_no_other() -> None:
    d = Driver()
    d.pair()
    starts = []
    for _ in range(10):
        d.post(ClientGone(d.arrive()))
        starts.append(int(d.now_s))
        d.now_s += 1.0
    d.now_s -= 1.0
    after = [each.number for each in seen(d).ended][2]
    assert [second.at_s for second in seen(d, after).seconds] == starts[3:]
    number = seen(d).number
    assert not seen(d, number).seconds
    d.post(ClientGone(d.arrive()))  # in a second that was shown before
    assert [second.at_s for second in seen(d, number).seconds] == starts[-1:]


def test_times_are_shown_on_the_clock_of_the_world() -> None:
    d = Driver()
    d.pair()
    attached_s = d.now_s
    d.now_s += 100.0
    assert seen(d).happenings[0].unix_time_ms == (UNIX_S + attached_s) * 1e3


def test_what_is_kept_is_bounded_and_holds_no_token() -> None:
    d = Driver()
    d.pair()
    for _ in range(MAX_ENDED + 10):
        request = d.arrive(prompt=(987654, 2, 3))
        d.post(ClientGone(request))
        d.now_s += 1.5
    recent = d.core.placements.recent
    assert (len(recent.ended), len(recent.seconds)) == (MAX_ENDED, min(MAX_SECONDS, MAX_ENDED + 10))
    assert "987654" not in str(seen(d).ended)
    for number in range(MAX_HAPPENINGS + 10):
        recent.note(Kind.WARNING, "", str(number))
    assert len(recent.happenings) == MAX_HAPPENINGS


def test_what_repeats_itself_at_once_is_one_entry_with_a_count() -> None:
    recent = Recent()
    for _ in range(3):
        recent.note(Kind.MOVE, "d0", "a sequence moves to d1: done")
    (happening,) = recent.happenings
    assert (happening.key, happening.number, happening.count) == (1, 3, 3)
    recent.now_s = 60.0
    recent.note(Kind.MOVE, "d0", "a sequence moves to d1: done")
    assert [each.count for each in recent.happenings] == [3, 1]


def test_the_newest_requests_of_each_stage_are_shown_and_all_are_counted() -> None:
    d = Driver(Limits(max_num_requests=50))
    p, _ = d.pair()
    arrived = [d.arrive() for _ in range(200)]
    for request in arrived[:50]:
        d.stage(p, request, Stage.PREFILL_STARTED)
    shown = [request.request_id for request in seen(d).requests]
    assert shown == [each.hex() for each in [*arrived[50 - MAX_OF_STAGE : 50], *arrived[-MAX_OF_STAGE:]]]
    assert dict(seen(d).stages) == {"prefill": 50, "queue": 150}


def test_each_tenant_sees_its_own_newest_requests() -> None:
    d = Driver()
    d.pair()
    first = d.arrive(tenant="a")
    for _ in range(100):
        d.arrive(tenant="b")
    assert (first.hex(), "a") in [(request.request_id, request.tenant) for request in seen(d).requests]


def test_a_request_is_found_whether_it_is_shown_in_the_list_or_not() -> None:
    d = Driver(Limits(max_num_requests=1))
    d.pair()
    placed, held = d.arrive(), [d.arrive() for _ in range(100)]
    assert held[0].hex() not in [request.request_id for request in seen(d).requests]
    for request in (placed, *held):
        found = running(d.core, request, d.now_s, UNIX_S)
        assert found is not None
        assert found.request_id == request.hex()
    assert running(d.core, RequestId(b"none"), d.now_s, UNIX_S) is None


def test_a_warning_that_names_a_request_is_not_for_watchers() -> None:
    d = Driver()
    p, _ = d.pair()
    for failure in (Failure.INTERNAL, Failure.INVALID):
        d.fail(p, d.arrive(), failure)
        (warning,) = [command for command in d.last if isinstance(command, Warn)]
        assert warning.names_request


async def test_an_operator_gets_it_over_the_wire_with_what_the_autoscaler_decided(start_router: StartRouter) -> None:
    router = await start_router()
    worker = await router.worker(link.ROLE_PREFILL, "p0")
    await router.until_status(lambda status: len(status.workers) == 1)
    before_ms = time.time() * 1e3
    decided = admin.ReportDecisionsRequest(decisions=["decode: add decode-1; binds: step time"])
    await router.admin.ReportDecisions(decided, metadata=await router.proof("ReportDecisions"))
    reply = await router.admin.GetLive(admin.GetLiveRequest(), metadata=await router.proof("GetLive"))
    happened = [(happening.kind, happening.subject) for happening in reply.happenings]
    assert happened == [("attached", worker.name), ("ready", worker.name), ("scaling", "")]
    assert reply.happenings[-1].text == "decode: add decode-1; binds: step time"
    assert before_ms - 1 <= reply.happenings[-1].unix_time_ms <= time.time() * 1e3 + 1
    assert 0 < reply.uptime_ms < 600_000
    asked = admin.GetLiveRequest(request_id="no id")
    assert not (await router.admin.GetLive(asked, metadata=await router.proof("GetLive"))).requests
    (shown,) = reply.status.workers
    assert shown.registration.worker_id == worker.name
