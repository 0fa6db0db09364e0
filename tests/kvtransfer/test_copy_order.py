"""Which copy goes next, over any order of copies, slices and cancels."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.kvtransfer.copies import OLDEST_EVERY, Copy, CopyQueue

PEER = Peer(WorkerId("peer"), Incarnation(1))
KEYS = [AttemptKey(RequestId(bytes([number]) * 16), Attempt(0)) for number in range(4)]


def copy(key: int, num_pages: int) -> Copy:
    pages = tuple(map(PageId, range(num_pages)))
    return Copy(PEER, KEYS[key], pages, pages)


def posted_in_turn(copies: CopyQueue, count: int) -> list[AttemptKey]:
    """Post so many slices of a page each, and let each land at once."""
    keys = []
    for _ in range(count):
        following = copies.next()
        if following is None:
            break
        copies.posted(following, 1, has_landed=True)
        keys.append(following.handoff)
        list(copies.pop_finished())
    return keys


def test_the_hand_off_with_the_fewest_pages_left_goes_first() -> None:
    copies = CopyQueue()
    for key, num_pages in enumerate((9, 3, 1)):
        copies.add(copy(key, num_pages))
    assert posted_in_turn(copies, 3) == [KEYS[2], KEYS[1], KEYS[1]]


def test_a_long_hand_off_gets_every_fourth_slice_however_many_short_ones_come() -> None:
    copies = CopyQueue()
    copies.add(copy(0, 100))
    sent = []
    for number in range(1, 9 * OLDEST_EVERY + 1):
        copies.add(copy(1 + number % 3, 1))
        sent += posted_in_turn(copies, 1)
    assert sent.count(KEYS[0]) == 9


def test_all_pages_of_a_hand_off_count_though_they_come_in_several_copies() -> None:
    copies = CopyQueue()
    for _ in range(4):
        copies.add(copy(0, 1))
    copies.add(copy(1, 2))
    assert posted_in_turn(copies, 2) == [KEYS[1], KEYS[1]]


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 5)),
    st.tuples(st.just("post"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 3), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_copies_of_a_hand_off_leave_in_their_order_and_only_when_what_was_posted_has_ended(
    actions: list[tuple[str, int, int]],
) -> None:
    copies, in_flight, added, left = CopyQueue(), [], [], []
    for action, first, second in actions:
        if action == "add":
            added.append(copy(first, second))
            copies.add(added[-1])
        elif action == "post" and (following := copies.next()) is not None:
            assert not following.failure
            earlier = added[: added.index(following)]
            before = (each for each in earlier if each.handoff == following.handoff)
            assert all(each.num_waiting == 0 for each in before)
            copies.posted(following, min(first, following.num_waiting), has_landed=bool(second))
            in_flight += [] if second else [following]
        elif action == "end" and in_flight:
            copies.slice_ended(in_flight.pop(first % len(in_flight)))
        elif action == "cancel":
            copies.cancel(KEYS[first], "cancelled")
        over = list(copies.pop_finished())
        assert not any(each in in_flight for each in over)
        assert all(each.failure or each.num_posted == len(each.src) for each in over)
        left += over
    while (following := copies.next()) is not None:
        copies.posted(following, following.num_waiting, has_landed=True)
    for each in in_flight:
        copies.slice_ended(each)
    left += copies.pop_finished()
    assert not copies
    for key in KEYS:
        assert [each for each in left if each.handoff == key] == [each for each in added if each.handoff == key]
