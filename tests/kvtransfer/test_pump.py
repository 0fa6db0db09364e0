"""The thread that drives copies, over a lane whose slices end when the test says so."""

import queue
import threading

import pytest
from scripted_lane import DESCRIPTION, FIRST, HANDOFF, OTHER, SECOND, Rig

from pdserve.errors import InvariantError, ProtocolError
from pdserve.ids import Incarnation, WorkerId
from pdserve.kvtransfer.backends.progress import WINDOW_S
from pdserve.kvtransfer.backends.pump import MAX_OUTSTANDING, MIN_SLICE_PAGES, SLICE_BYTES
from pdserve.kvtransfer.backends.route import MAX_SLICES_IN_FLIGHT
from pdserve.kvtransfer.mover import CopyStopped
from pdserve.kvtransfer.session import Peer


def test_a_failed_copy_is_reported_only_after_its_other_slices_have_ended(rig: Rig) -> None:
    copy_id = rig.write(FIRST, 3)
    rig.lane.until(lambda: len(rig.lane.posted) == 3)
    rig.lane.posted[0].end = "cut"
    rig.lane.posted[2].end = "landed"
    rig.lane.let_it_look()
    assert rig.stopped.empty()
    rig.lane.posted[1].end = "landed"
    assert rig.next() == CopyStopped(copy_id, None, "cut", in_doubt=True)


def test_a_later_copy_that_lands_first_is_reported_later(rig: Rig) -> None:
    first, second = rig.write(FIRST, 1), rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    rig.lane.posted[1].end = "landed"
    rig.lane.let_it_look()
    assert rig.stopped.empty()
    rig.lane.posted[0].end = "landed"
    assert [rig.next().copy_id, rig.next().copy_id] == [first, second]


def test_a_stuck_peer_holds_up_no_other_and_gets_few_slices_at_once(rig: Rig) -> None:
    rig.pump.attach(SECOND, DESCRIPTION)
    rig.write(FIRST, 20)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    copy_id = rig.write(SECOND, 1)
    rig.lane.until(lambda: len(rig.lane.posted) > MAX_SLICES_IN_FLIGHT)
    rig.lane.posted[-1].end = "landed"
    assert rig.next().copy_id == copy_id
    rig.lane.let_it_look()
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT + 1


def test_of_a_cancelled_hand_off_nothing_more_is_posted_and_it_stops_when_what_was_posted_has_ended(rig: Rig) -> None:
    ids = [rig.write(FIRST, 10), rig.write(FIRST, 1)]
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    rig.pump.cancel(FIRST, HANDOFF)
    for posted in rig.lane.posted[:-1]:
        posted.end = "landed"
    rig.lane.let_it_look()
    assert rig.stopped.empty()
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT
    rig.lane.posted[-1].end = "landed"
    assert [rig.next(), rig.next()] == [CopyStopped(each, None, "cancelled") for each in ids]
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT


def test_a_posted_slice_of_a_cancelled_hand_off_that_is_lost_leaves_it_in_doubt(rig: Rig) -> None:
    copy_id = rig.write(FIRST, 10)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    rig.pump.cancel(FIRST, HANDOFF)
    rig.lane.posted[0].end = "cut"
    for posted in rig.lane.posted[1:]:
        posted.end = "landed"
    assert rig.next() == CopyStopped(copy_id, None, "cancelled", in_doubt=True)


def test_a_cancel_ends_no_other_hand_off_to_that_peer(rig: Rig) -> None:
    cancelled = rig.write(FIRST, 10)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    kept = rig.write(FIRST, 1, OTHER)
    rig.pump.cancel(FIRST, HANDOFF)
    rig.pump.cancel(SECOND, HANDOFF)
    for number in range(MAX_SLICES_IN_FLIGHT + 1):
        rig.lane.until(lambda at=number: len(rig.lane.posted) > at)  # type: ignore[misc]
        rig.lane.posted[number].end = "landed"
    reports = {rig.next().copy_id: None, rig.next().copy_id: None}
    assert set(reports) == {cancelled, kept}
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT + 1


def test_a_short_hand_off_does_not_wait_for_the_rest_of_a_long_one(rig: Rig) -> None:
    long = rig.write(FIRST, 30)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    short = rig.write(FIRST, 1, OTHER)
    for posted in rig.lane.posted[:2]:
        posted.end = "landed"
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT + 2)
    assert [len(posted.src) for posted in rig.lane.posted] == [MIN_SLICE_PAGES] * (MAX_SLICES_IN_FLIGHT + 2)
    assert rig.lane.posted[MAX_SLICES_IN_FLIGHT].src[0] == 0  # the short one's first page
    for posted in rig.lane.posted[2:]:
        posted.end = "landed"
    stopped = rig.next()
    assert (stopped.copy_id, stopped.reason) == (short, "")
    assert long != short


def test_a_forgotten_peers_copies_are_reported_at_once_and_their_slices_watched_to_their_end(rig: Rig) -> None:
    ids = [rig.write(FIRST, 1), rig.write(FIRST, 1)]
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    rig.pump.forget(FIRST)
    assert [rig.next(), rig.next()] == [CopyStopped(i, None, "the process of first has ended") for i in ids]
    for posted in rig.lane.posted:
        posted.end = "cancelled"
    rig.lane.until(lambda: rig.lane.gone == rig.lane.posted)


def test_after_a_failure_nothing_is_posted_until_the_next_copy_opens_the_peer_anew(rig: Rig) -> None:
    ids = [rig.write(FIRST, 10), rig.write(FIRST, 1)]
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT)
    rig.lane.posted[0].end = "cut"
    rig.lane.let_it_look()
    with pytest.raises(ProtocolError, match="2 copies to it are still outstanding"):
        rig.pump.attach(FIRST, DESCRIPTION)
    for posted in rig.lane.posted[1:]:
        posted.end = "landed"
    # The second copy was never posted: nothing of it is under way.
    assert [rig.next(), rig.next()] == [CopyStopped(i, None, "cut", in_doubt=i == ids[0]) for i in ids]
    assert len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT
    mended = rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == MAX_SLICES_IN_FLIGHT + 1)
    assert rig.lane.posted[-1].remote == 2
    rig.lane.posted[-1].end = "landed"
    stopped = rig.next()
    assert stopped.copy_id == mended
    assert stopped.digests is not None


def test_too_many_copies_at_once_are_refused(rig: Rig) -> None:
    for _ in range(MAX_OUTSTANDING):
        rig.write(FIRST, 1)
    refused = rig.write(FIRST, 1)
    assert rig.next() == CopyStopped(refused, None, "16384 copies are outstanding already")


def test_the_thread_comes_round_while_something_is_in_flight_and_then_rests(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.lane.let_it_look()
    before = rig.pump.turn
    rig.lane.let_it_look()
    assert before is not None
    assert rig.pump.turn not in (None, before)
    rig.lane.posted[0].end = "landed"
    rig.next()
    assert rig.rests()


def test_a_broken_thread_reports_nothing_and_takes_no_orders(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.lane.breaks = True
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 2)
    with pytest.raises(InvariantError, match="has died"):
        rig.pump.attach(SECOND, DESCRIPTION)
    with pytest.raises(InvariantError, match="has died"):
        rig.write(FIRST, 1)
    assert rig.stopped.empty()
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_breaks_while_it_attaches_a_peer_keeps_nobody_waiting(rig: Rig) -> None:
    rig.lane.breaks = True
    answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def attach() -> None:
        try:
            rig.pump.attach(Peer(WorkerId("third"), Incarnation(1)), DESCRIPTION)
        except InvariantError as error:
            answer.put(error)

    threading.Thread(target=attach, daemon=True).start()
    assert str(answer.get(timeout=5)) == "the mover's thread has died"


def test_a_slice_that_fails_without_a_word_fails_its_copy(rig: Rig) -> None:
    copy_id = rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.lane.posted[0].end = ""
    stopped = rig.next()
    assert (stopped.copy_id, stopped.digests, stopped.in_doubt) == (copy_id, None, True)
    assert stopped.reason == "the library does not say why"


def test_closing_gives_the_lane_back_only_if_nothing_is_in_flight(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.pump.close()
    assert not rig.lane.shut_down
    assert rig.stopped.empty()


def test_a_transfer_that_does_not_move_is_told_of_and_not_ended(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    copy_id = rig.write(FIRST, 1)
    rig.lane.until(lambda: len(rig.lane.posted) == 1)
    rig.clock.advance(WINDOW_S)
    rig.lane.let_it_look()
    assert rig.pump.num_stalled == 1
    assert f"first: {SLICE_BYTES} bytes in flight hardly move" in caplog.text
    assert rig.stopped.empty()
    rig.lane.posted[0].end = "landed"
    assert rig.next().copy_id == copy_id
    assert rig.pump.num_stalled == 0
