"""A mover measures the way to a peer, over a backend whose slices end when the test says so."""

import pytest
from scripted_backend import DESCRIPTION, FIRST, NUM_PAGES, PAGE_BYTES, SECOND, Rig

from pdserve.kvtransfer.speed import STUCK_S, WINDOW_S, PairSpeed, ProbeError


def end_in_turn(rig: Rig, took_s: list[float], first: int | None = None) -> None:
    """Let slices land one after the other, each after a time. first: the place of the first; None: the next one."""
    gone = len(rig.backend.gone)
    for number, seconds in enumerate(took_s):
        place = number + (gone if first is None else first)
        rig.backend.until(lambda at=place: len(rig.backend.posted) > at)  # type: ignore[misc]
        rig.clock.advance(seconds)
        rig.backend.posted[place].end = "landed"
        rig.backend.until(lambda at=gone + number: len(rig.backend.gone) > at)  # type: ignore[misc]


def test_a_probe_tells_the_fastest_of_its_writes_and_leaves_out_the_one_that_connects(rig: Rig) -> None:
    answer = rig.mover.probe(FIRST)
    end_in_turn(rig, [0.001, 0.5, 0.25, 0.5, 0.2, 0.1, 0.2, 0.2])
    assert answer.result(timeout=20) == PairSpeed(2 * PAGE_BYTES / 0.25, pytest.approx(0.1), "script")


def test_a_probe_writes_into_probe_memory_alone(rig: Rig) -> None:
    answer = rig.mover.probe(FIRST)
    end_in_turn(rig, [0.1] * 8)
    answer.result(timeout=20)
    written = {index for posted in rig.backend.posted for index in (*posted.src, *posted.dst)}
    assert written == {NUM_PAGES, NUM_PAGES + 1}


def test_what_a_probe_measures_beside_a_copy_counts_for_nothing(rig: Rig) -> None:
    answer = rig.mover.probe(FIRST)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 2)
    rig.backend.posted[0].end = "landed"
    rig.backend.until(lambda: len(rig.backend.gone) == 1)
    rig.backend.let_it_look()
    assert len(rig.backend.posted) == 2  # the probe waits for the copy
    rig.backend.posted[1].end = "landed"
    rig.next()
    end_in_turn(rig, [0.1] * 7)
    assert not answer.done()
    end_in_turn(rig, [0.1])
    assert answer.result(timeout=20).bytes_per_s == pytest.approx(2 * PAGE_BYTES / 0.1)


def test_a_frozen_peer_keeps_no_other_from_being_probed(rig: Rig) -> None:
    rig.mover.attach(SECOND, DESCRIPTION)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    answer = rig.mover.probe(SECOND)
    rig.backend.let_it_look()
    assert len(rig.backend.posted) == 1  # the copy may still move
    rig.clock.advance(WINDOW_S)
    end_in_turn(rig, [0.1] * 8, first=1)
    assert answer.result(timeout=20).page_s == pytest.approx(0.1)


def test_a_peer_that_freezes_while_it_is_probed_keeps_no_other_from_being_probed(rig: Rig) -> None:
    rig.mover.attach(SECOND, DESCRIPTION)
    frozen = rig.mover.probe(FIRST)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    answer = rig.mover.probe(SECOND)
    rig.clock.advance(STUCK_S + 0.1)
    end_in_turn(rig, [0.1] * 8, first=1)
    assert answer.result(timeout=20).page_s == pytest.approx(0.1)
    assert not frozen.done()


def test_bytes_that_a_thawing_peer_takes_spoil_what_is_being_measured(rig: Rig) -> None:
    rig.mover.attach(SECOND, DESCRIPTION)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.clock.advance(WINDOW_S)
    answer = rig.mover.probe(SECOND)
    rig.backend.until(lambda: len(rig.backend.posted) == 2)
    rig.backend.posted[0].end = "landed"
    rig.next()
    rig.backend.posted[1].end = "landed"
    rig.backend.until(lambda: len(rig.backend.gone) == 2)
    end_in_turn(rig, [0.1] * 7)
    assert not answer.done()
    end_in_turn(rig, [0.1])
    assert answer.result(timeout=20).page_s == pytest.approx(0.1)


def test_a_probe_that_fails_leaves_the_pair_whole(rig: Rig) -> None:
    answer = rig.mover.probe(FIRST)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.backend.posted[0].end = "cut"
    with pytest.raises(ProbeError, match="cut"):
        answer.result(timeout=20)
    rig.write(FIRST, 1)
    rig.backend.until(lambda: len(rig.backend.posted) == 2)
    rig.backend.posted[1].end = "landed"
    stopped = rig.next()
    assert stopped.reason == ""


def test_a_probe_of_a_peer_that_is_forgotten_fails_and_its_slice_is_watched_to_its_end(rig: Rig) -> None:
    answer = rig.mover.probe(FIRST)
    rig.backend.until(lambda: len(rig.backend.posted) == 1)
    rig.mover.forget(FIRST)
    with pytest.raises(ProbeError, match="given up"):
        answer.result(timeout=20)
    rig.backend.posted[0].end = "landed"
    rig.backend.until(lambda: rig.backend.gone == rig.backend.posted)
