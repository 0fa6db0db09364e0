"""A peer is stalled while bytes are in flight to it and hardly move; idle time never counts."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvtransfer.backends.progress import FLOOR_BYTES_PER_S, WINDOW_S, Progress

ENOUGH = int(FLOOR_BYTES_PER_S * WINDOW_S) + 1


def test_a_peer_to_which_nothing_moves_for_a_window_is_stalled_and_told_of_once() -> None:
    progress = Progress()
    progress.posted(100, 10.0)
    assert not progress.look(10.0 + 0.9 * WINDOW_S)
    assert progress.look(10.0 + WINDOW_S)
    assert not progress.look(10.0 + 2 * WINDOW_S)
    assert progress.is_stalled


def test_a_trickle_is_a_stall_whatever_lands_now_and_then() -> None:
    progress = Progress()
    progress.posted(ENOUGH, 0.0)
    for second in range(1, 20):
        progress.ended(1000, landed=True)
        progress.look(float(second))
    assert progress.is_stalled


def test_a_peer_that_moves_again_is_no_longer_stalled() -> None:
    progress = Progress()
    progress.posted(3 * ENOUGH, 0.0)
    progress.look(WINDOW_S)
    progress.ended(ENOUGH, landed=True)
    assert not progress.look(2 * WINDOW_S)
    assert not progress.is_stalled


def test_a_slice_that_fails_is_no_progress() -> None:
    progress = Progress()
    progress.posted(3 * ENOUGH, 0.0)
    progress.ended(ENOUGH, landed=False)
    assert progress.look(WINDOW_S)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 0.9 * WINDOW_S), st.integers(1, 1000)), max_size=20))
def test_small_transfers_with_pauses_are_never_stalled(transfers: list[tuple[float, float, int]]) -> None:
    progress, now_s = Progress(), 0.0
    for pause_s, took_s, num_bytes in transfers:
        now_s += pause_s
        assert not progress.look(now_s)
        progress.posted(num_bytes, now_s)
        now_s += took_s
        assert not progress.look(now_s)
        progress.ended(num_bytes, landed=True)
    assert not progress.is_stalled
