"""What a worker reports of its load adds up over the routers that sent it, and its counts never fall."""

from dataclasses import replace

import pytest
from lone_core import LoneCore, job, key_of

from pdserve.base.errors import PeerFault
from pdserve.base.ids import Attempt, Incarnation, Peer, WorkerId
from pdserve.base.roles import Role
from pdserve.decode_worker.receiver import Quiesced
from pdserve.kvtransfer.doors import SenderMessage
from pdserve.perfmodel.curve import attention_work
from pdserve.protocol.reports import Failure, LoadPart
from pdserve.router.requests.events import LinkId, LoadReported
from pdserve.router.wire import worker_events
from pdserve.worker import wire
from pdserve.worker.messages import Cancelled, Command, Failed, Placed, RouterLost, RouterRef

NUM_PAGES = 64
OURS, THEIRS = RouterRef(1), RouterRef(2)
PEER = Peer(WorkerId("other"), Incarnation(1))


@pytest.fixture
def worker() -> LoneCore:
    return LoneCore(NUM_PAGES, 64, step_tokens=16, role=Role.DECODE)


def test_each_router_learns_what_the_others_wait_for_on_a_prefill_worker(worker: LoneCore) -> None:
    worker.handle(Placed(OURS, job(1, 10), 1e9, target=PEER, target_address="host:1"))
    worker.handle(Placed(THEIRS, job(2, 30), 1e9, target=PEER, target_address="host:1"))
    load = worker.core.load()
    assert load.waiting_tokens == 40
    assert load.parts.others(OURS) == LoadPart(0, 0, 0, 30, attention_work(30, 0), 1, 30, attention_work(30, 0))
    assert load.parts.others(THEIRS).waiting_tokens == 10
    assert load.parts.others(RouterRef(3)).waiting_tokens == 40, "it has sent nothing"
    worker.step()  # 10 of ours, 6 of theirs
    assert worker.core.load().parts.others(THEIRS).waiting_tokens == 0
    assert worker.core.load().parts.others(OURS).waiting_tokens == 24
    assert worker.core.load().parts.others(OURS).waiting_work == attention_work(24, 6)


def test_each_router_learns_what_the_others_decode_or_will(worker: LoneCore) -> None:
    worker.handle(Placed(THEIRS, job(1, 10), 1e9, None))
    worker.handle(Placed(THEIRS, job(2, 12, n=2), 1e9, PEER))
    assert worker.core.load().parts.others(OURS) == LoadPart(0, 3, 34, 10, 100, 3, 10, 100)
    worker.step()
    assert worker.core.load().parts.others(OURS) == LoadPart(1, 2, 34, 0, 0, 3, 10, 100)
    assert worker.core.load().parts.others(THEIRS) == LoadPart()


def test_what_was_taken_in_never_falls_though_its_router_is_gone(worker: LoneCore) -> None:
    worker.handle(Placed(THEIRS, job(1, 10), 1e9, None))
    worker.handle(RouterLost(THEIRS))
    assert worker.core.load().parts.others(OURS) == LoadPart(num_taken=1, taken_tokens=10, taken_work=100)


def test_a_continuation_that_is_refused_for_want_of_room_was_not_taken_in(worker: LoneCore) -> None:
    for number in range(5):
        worker.handle(Placed(THEIRS, job(number, 50), 1e9, PEER))
    before = worker.core.load().parts.others(OURS)
    (failed,) = worker.handle(Placed(THEIRS, job(9, 40), 1e9, PEER, extra_tokens=9))
    assert isinstance(failed, Failed)
    assert worker.core.load().parts.others(OURS) == before


def test_hand_offs_without_room_say_how_many_pages_they_want(worker: LoneCore) -> None:
    commands: list[Command] = []
    for number in range(6):
        commands += worker.handle(Placed(OURS, job(number, 60), 1e9, PEER))
    load = worker.core.load()
    num_ungranted = load.num_waiting
    assert num_ungranted > 0
    assert load.pages_wanted == num_ungranted * 15


@pytest.mark.parametrize(
    "peer", [PEER, PEER._replace(incarnation=Incarnation(2))], ids=["its sender", "another process"]
)
def test_a_hand_off_that_its_sender_gives_up_waits_for_pages_no_longer(worker: LoneCore, peer: Peer) -> None:
    jobs = [job(number, 60) for number in range(6)]
    for each in jobs:
        worker.handle(Placed(OURS, each, 1e9, PEER))
    wanted, key = worker.core.load().pages_wanted, key_of(5)
    commands = worker.handle(SenderMessage(peer, key, Quiesced("its prompt was cancelled")))
    failed = [Failed(OURS, key, Failure.SENDER_GAVE_UP, "its prompt was cancelled")] if peer == PEER else []
    assert commands == failed
    assert worker.core.load().pages_wanted == wanted - 15 * len(failed)


def test_continuations_of_a_later_attempt_that_are_cancelled_are_not_taken_off_an_earlier_one(worker: LoneCore) -> None:
    placed = Placed(THEIRS, replace(job(1, 10, n=3), indices=(1,)), 1e9, PEER)
    worker.handle(placed)
    worker.handle(Cancelled(placed.job.request_id, Attempt(2), (0, 2)))
    assert worker.core.load().parts.others(OURS) == LoadPart(0, 1, 10, 0, 0, 1)


def test_a_heartbeat_tells_each_router_of_the_others(worker: LoneCore) -> None:
    worker.handle(Placed(THEIRS, job(1, 10), 1e9, None))
    refused = {PeerFault.LAYOUT: 1}
    for router, others in ((OURS, LoadPart(0, 1, 10, 10, 100, 1, 10, 100)), (THEIRS, LoadPart())):
        (event,) = worker_events(LinkId(1), wire.heartbeat(worker.core.load(), 7, refused, router))
        assert isinstance(event, LoadReported)
        assert event.load.others == others
        assert event.load.pages_free == NUM_PAGES
