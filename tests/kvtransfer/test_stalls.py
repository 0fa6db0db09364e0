"""A peer is stalled while bytes are in flight to it and hardly move; idle time never counts."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer.speed import FLOOR_BYTES_PER_S, WINDOW_S, StallDetector

ENOUGH = int(FLOOR_BYTES_PER_S * WINDOW_S) + 1


def test_a_peer_to_which_nothing_moves_for_a_window_is_stalled_and_told_of_once() -> None:
    stalls = StallDetector()
    stalls.posted(100, 10.0)
    assert not stalls.has_stalled(10.0 + 0.9 * WINDOW_S)
    assert stalls.has_stalled(10.0 + WINDOW_S)
    assert not stalls.has_stalled(10.0 + 2 * WINDOW_S)
    assert stalls.is_stalled


def test_a_trickle_is_a_stall_whatever_lands_now_and_then() -> None:
    stalls = StallDetector()
    stalls.posted(ENOUGH, 0.0)
    for second in range(1, 20):
        stalls.ended(1000, landed=True)
        stalls.has_stalled(float(second))
    assert stalls.is_stalled


def test_a_peer_that_moves_again_is_no_longer_stalled() -> None:
    stalls = StallDetector()
    stalls.posted(3 * ENOUGH, 0.0)
    stalls.has_stalled(WINDOW_S)
    stalls.ended(ENOUGH, landed=True)
    assert not stalls.has_stalled(2 * WINDOW_S)
    assert not stalls.is_stalled


def test_a_slice_that_fails_is_no_progress() -> None:
    stalls = StallDetector()
    stalls.posted(3 * ENOUGH, 0.0)
    stalls.ended(ENOUGH, landed=False)
    assert stalls.has_stalled(WINDOW_S)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 0.9 * WINDOW_S), st.integers(1, 1000)), max_size=20))
def test_small_transfers_with_pauses_are_never_stalled(transfers: list[tuple[float, float, int]]) -> None:
    stalls, now_s = StallDetector(), 0.0
    for pause_s, took_s, num_bytes in transfers:
        now_s += pause_s
        assert not stalls.has_stalled(now_s)
        stalls.posted(num_bytes, now_s)
        now_s += took_s
        assert not stalls.has_stalled(now_s)
        stalls.ended(num_bytes, landed=True)
    assert not stalls.is_stalled
