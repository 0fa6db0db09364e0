"""A mover's thread, over a backend whose slices end when the test says so."""

import queue
import threading

import pytest
from scripted_backend import DESCRIPTION, FIRST, HANDOFF, OTHER, SECOND, Rig

from pdserve.base.errors import InvariantError, ProtocolError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.channels import MAX_SLICES_IN_FLIGHT, MIN_SLICE_PAGES, SLICE_BYTES
from pdserve.kvtransfer.doors import CopyStopped
from pdserve.kvtransfer.mover import MAX_OUTSTANDING
from pdserve.kvtransfer.speed import WINDOW_S


def test_a_failed_copy_is_reported_only_after_its_other_slices_have_ended(rig: Rig) -> None:
    rig.write(FIRST, 3)
    rig.backend.until(lambda: len(rig.backend.posted) == 3)
    rig.backend.posted[0].end = "cut"
    rig.backend.posted[2].end = "landed"
    rig.backend.let_it_look()
    assert rig.stopped.empty()
    rig.backend.posted[1].end = "landed"
    assert rig.next() == CopyStopped(None, "cut", in_doubt=True)


def test_a_later_copy_that_lands_first_is_reported_later(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.write(FIRST, 2)
    rig.backend.until(lambda: len(rig.backend.posted) == 3)
    rig.backend.posted[1].end = rig.backend.posted[2].end = "landed"
    rig.backend.let_it_look()
    assert rig.stopped.empty()
    rig.backend.posted[0].end = "landed"
    assert [len(rig.next().digests), len(rig.next().digests)] == [MIN_SLICE_PAGES, 2 * MIN_SLICE_PAGES]


def test_a_stuck_peer_holds_up_no_other_and_gets_few_slices_at_once(rig: Rig) -> None:
    rig.mover.attach(SECOND, DESCRIPTION)
    rig.write(FIRST, 20)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT)
    rig.write(SECOND, 1)
    rig.backend.until(lambda: len(rig.backend.posted) > MAX_SLICES_IN_FLIGHT)
    rig.backend.posted[-1].end = "landed"
    assert rig.stopped.get(timeout=20).peer == SECOND
    rig.backend.let_it_look()
    assert len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT + 1


def test_of_a_cancelled_hand_off_nothing_more_is_posted_and_it_stops_when_what_was_posted_has_ended(rig: Rig) -> None:
    rig.write(FIRST, 10)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT)
    rig.mover.cancel(FIRST, HANDOFF)
    for posted in rig.backend.posted[:-1]:
        posted.end = "landed"
    rig.backend.let_it_look()
    assert rig.stopped.empty()
    assert len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT
    rig.backend.posted[-1].end = "landed"
    assert [rig.next(), rig.next()] == [CopyStopped(None, "cancelled")] * 2
    assert len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT


def test_a_posted_slice_of_a_cancelled_hand_off_that_is_lost_leaves_it_in_doubt(rig: Rig) -> None:
    rig.write(FIRST, 10)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT)
    rig.mover.cancel(FIRST, HANDOFF)
    rig.backend.posted[0].end = "cut"
    for posted in rig.backend.posted[1:]:
        posted.end = "landed"
    assert rig.next() == CopyStopped(None, "cancelled", in_doubt=True)


def test_a_cancel_ends_no_other_hand_off_to_that_peer(rig: Rig) -> None:
    rig.write(FIRST, 10)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT)
    rig.write(FIRST, 1, OTHER)
    rig.mover.cancel(FIRST, HANDOFF)
    rig.mover.cancel(SECOND, HANDOFF)
    for number in range(MAX_SLICES_IN_FLIGHT + 1):
        rig.backend.until(lambda at=number: len(rig.backend.posted) > at)  # type: ignore[misc]
        rig.backend.posted[number].end = "landed"
    reports = [rig.stopped.get(timeout=20) for _ in range(2)]
    assert {(report.key, report.event.reason) for report in reports} == {(HANDOFF, "cancelled"), (OTHER, "")}
    assert len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT + 1


def test_a_short_hand_off_does_not_wait_for_the_rest_of_a_long_one(rig: Rig) -> None:
    rig.write(FIRST, 30)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT)
    rig.write(FIRST, 1, OTHER)
    for posted in rig.backend.posted[:2]:
        posted.end = "landed"
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT + 2)
    assert [len(posted.src) for posted in rig.backend.posted] == [MIN_SLICE_PAGES] * (MAX_SLICES_IN_FLIGHT + 2)
    assert rig.backend.posted[MAX_SLICES_IN_FLIGHT].src[0] == 0  # the short one's first page
    for posted in rig.backend.posted[2:]:
        posted.end = "landed"
    stopped = rig.stopped.get(timeout=20)
    assert (stopped.key, stopped.event.reason) == (OTHER, "")


def test_a_forgotten_peers_copies_are_reported_at_once_and_their_slices_watched_to_their_end(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 2)
    rig.mover.forget(FIRST)
    assert [rig.next(), rig.next()] == [CopyStopped(None, "the process of first has ended")] * 2
    for posted in rig.backend.posted:
        posted.end = "cancelled"
    rig.backend.until(lambda: rig.backend.gone == rig.backend.posted)


def test_after_a_failure_nothing_is_posted_until_the_next_copy_opens_the_peer_anew(rig: Rig) -> None:
    rig.write(FIRST, 10)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT)
    rig.backend.posted[0].end = "cut"
    rig.backend.let_it_look()
    with pytest.raises(ProtocolError, match="2 copies to it are still outstanding"):
        rig.mover.attach(FIRST, DESCRIPTION)
    for posted in rig.backend.posted[1:]:
        posted.end = "landed"
    # The second copy was never posted: nothing of it is under way.
    assert [rig.next(), rig.next()] == [CopyStopped(None, "cut", in_doubt=True), CopyStopped(None, "cut")]
    assert len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == MAX_SLICES_IN_FLIGHT + 1)
    assert rig.backend.posted[-1].connection == 2
    rig.backend.posted[-1].end = "landed"
    assert rig.next().digests is not None


def test_too_many_copies_at_once_are_refused(rig: Rig) -> None:
    for _ in range(MAX_OUTSTANDING):
        rig.write(FIRST, 1)
    rig.write(FIRST, 1)
    assert rig.next() == CopyStopped(None, "16384 copies are outstanding already")


def test_the_thread_comes_round_while_something_is_in_flight_and_then_rests(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.backend.let_it_look()
    before = rig.mover.turn
    rig.backend.let_it_look()
    assert before is not None
    assert rig.mover.turn not in (None, before)
    rig.backend.posted[0].end = "landed"
    rig.next()
    assert rig.rests()


def test_a_broken_thread_reports_nothing_and_takes_no_orders(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.backend.breaks = True
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 2)
    with pytest.raises(InvariantError, match="has died"):
        rig.mover.attach(SECOND, DESCRIPTION)
    with pytest.raises(InvariantError, match="has died"):
        rig.write(FIRST, 1)
    assert rig.stopped.empty()
    assert "ZeroDivisionError" in caplog.text


def test_a_thread_that_breaks_at_a_look_leaves_all_that_is_in_flight_to_the_end_of_the_process(rig: Rig) -> None:
    rig.write(FIRST, 2)
    rig.backend.until(lambda: len(rig.backend.posted) == 2)
    rig.backend.breaks_at_looks = True
    num_looks = rig.backend.num_looks
    rig.backend.until(lambda: rig.backend.num_looks > num_looks)
    rig.mover.close()
    assert rig.backend.closed_in_flight is True
    assert rig.backend.num_closed == 0


def test_a_thread_that_breaks_while_it_attaches_a_peer_keeps_nobody_waiting(rig: Rig) -> None:
    rig.backend.breaks = True
    answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def attach() -> None:
        try:
            rig.mover.attach(Peer(WorkerId("third"), Incarnation(1)), DESCRIPTION)
        except InvariantError as error:
            answer.put(error)

    threading.Thread(target=attach, daemon=True).start()
    assert str(answer.get(timeout=5)) == "the mover's thread has died"


def test_a_slice_that_fails_without_a_word_fails_its_copy(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.backend.posted[0].end = ""
    stopped = rig.next()
    assert (stopped.digests, stopped.in_doubt) == (None, True)
    assert stopped.reason == "the library does not say why"


def test_closing_tells_the_backend_whether_anything_is_in_flight(rig: Rig) -> None:
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.mover.close()
    assert rig.backend.closed_in_flight is True
    assert rig.backend.num_closed == 0
    assert rig.stopped.empty()


def test_closing_closes_every_connection_when_nothing_is_in_flight(rig: Rig) -> None:
    rig.mover.attach(SECOND, DESCRIPTION)
    rig.mover.close()
    assert rig.backend.closed_in_flight is False
    assert rig.backend.num_closed == 2


def test_a_transfer_that_does_not_move_is_told_of_and_not_ended(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.clock.advance(WINDOW_S)
    rig.backend.let_it_look()
    assert rig.mover.num_stalled == 1
    assert f"first: {SLICE_BYTES} bytes in flight hardly move" in caplog.text
    assert rig.stopped.empty()
    rig.backend.posted[0].end = "landed"
    assert rig.next().digests is not None
    assert rig.mover.num_stalled == 0
