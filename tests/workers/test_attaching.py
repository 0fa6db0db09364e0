"""A worker's streams to its routers: dialled, given up, and dialled again."""

from collections import Counter

from hypothesis import given
from hypothesis.strategies import DataObject, data, frozensets, lists, sampled_from, tuples

from pdserve.worker.attaching import MAX_BACKOFF_S, MIN_BACKOFF_S, Attaching, Close, Command, Dial, Finish, Redial
from pdserve.worker.messages import RouterLost, RouterRef

FIRST, SECOND = RouterRef(1), RouterRef(2)
LOST = [Close(FIRST), RouterLost(FIRST)]


def dialled() -> Attaching:
    attaching = Attaching(jitter=lambda: 1.0)
    assert find(attaching, "r0") == [Dial(FIRST, "r0")]
    return attaching


def find(attaching: Attaching, *addresses: str, name: str = "routers") -> list[Command]:
    return attaching.note_addresses(name, frozenset(addresses))


def attached() -> Attaching:
    attaching = dialled()
    assert attaching.attach(FIRST)
    assert attaching.attached == (FIRST,)
    return attaching


def test_a_lost_router_is_reported_once_and_dialled_again() -> None:
    attaching = attached()
    assert attaching.end(FIRST) == [*LOST, Redial("r0", MIN_BACKOFF_S)]
    assert attaching.end(FIRST) == []
    assert attaching.attached == ()
    assert attaching.dial("r0") == [Dial(SECOND, "r0")]


def test_a_router_that_does_not_welcome_in_time_is_given_up() -> None:
    assert dialled().time_out(FIRST) == [*LOST, Redial("r0", MIN_BACKOFF_S)]
    assert attached().time_out(FIRST) == []


def backoffs_s(attaching: Attaching, first: int, count: int) -> list[float]:
    """Return how long is waited after each of so many tries that fail; the next one is under way then."""
    waited_s = []
    for router in range(first, first + count):
        *_, redial = attaching.end(RouterRef(router))
        assert isinstance(redial, Redial)
        waited_s.append(redial.delay_s)
        assert attaching.dial("r0") == [Dial(RouterRef(router + 1), "r0")]
    return waited_s


def test_a_router_is_dialled_more_and_more_slowly_until_it_answers() -> None:
    attaching = dialled()
    waited_s = backoffs_s(attaching, 1, 6)
    assert waited_s[:2] == [MIN_BACKOFF_S, 2 * MIN_BACKOFF_S]
    assert waited_s[-2:] == [MAX_BACKOFF_S, MAX_BACKOFF_S]
    assert attaching.attach(RouterRef(7))
    assert backoffs_s(attaching, 7, 2) == [MIN_BACKOFF_S, 2 * MIN_BACKOFF_S]


def test_a_router_that_dismisses_this_process_is_dialled_no_more() -> None:
    for attaching in (dialled(), attached()):
        assert attaching.dismiss(FIRST) == [Close(FIRST)]
        assert attaching.dismiss(FIRST) == []
        assert find(attaching, "r0") == []


def test_a_worker_that_leaves_ends_streams_in_order_and_dials_no_more() -> None:
    attaching = attached()
    assert attaching.leave() == [Finish(FIRST)]
    assert attaching.end(FIRST) == LOST
    assert attaching.dial("r0") == []
    assert dialled().leave() == LOST


def test_a_router_that_a_name_leads_to_later_is_dialled_beside_those_that_are_attached() -> None:
    attaching = attached()
    assert find(attaching, "r0", "r1") == [Dial(SECOND, "r1")]
    assert find(attaching, "r0", "r1") == []
    assert find(attaching, "r1", name="another name of it") == []
    assert attaching.attach(SECOND)
    assert attaching.attached == (FIRST, SECOND)


def test_a_router_that_no_name_leads_to_stays_attached_until_its_link_is_lost() -> None:
    attaching = attached()
    assert find(attaching) == []
    assert attaching.attached == (FIRST,)
    assert attaching.end(FIRST) == [*LOST, Redial("r0", MIN_BACKOFF_S)]
    assert attaching.dial("r0") == []
    assert find(attaching, "r0") == [Dial(SECOND, "r0")]


def test_a_router_of_another_name_stays() -> None:
    attaching = attached()
    find(attaching, "r0", name="another name of it")
    find(attaching)
    attaching.end(FIRST)
    assert attaching.dial("r0") == [Dial(SECOND, "r0")]


NAMES, ADDRESSES = ("n0", "n1"), ("r0", "r1")
FOUND = tuples(sampled_from(NAMES), frozensets(sampled_from(ADDRESSES)))
HAPPENINGS = sampled_from(("due", "welcomed", "timed out", "ended"))


@given(lists(FOUND | HAPPENINGS, max_size=60), data())
def test_each_address_that_a_name_leads_to_has_one_stream_or_one_redial(
    happenings: list[tuple[str, frozenset[str]] | str], choice: DataObject
) -> None:
    attaching, streams, redials = Attaching(jitter=lambda: 1.0), dict[RouterRef, str](), list[str]()
    names: dict[str, frozenset[str]] = {}
    for happening in happenings:
        match happening:
            case (str(name), addresses):
                names[name] = addresses
                commands = attaching.note_addresses(name, addresses)
            case "due" if redials:
                address = choice.draw(sampled_from(redials))
                redials.remove(address)
                commands = attaching.dial(address)
            case "welcomed" if streams:
                assert attaching.attach(choice.draw(sampled_from(sorted(streams))))
                commands = []
            case "timed out" | "ended" if streams:
                router = choice.draw(sampled_from(sorted(streams)))
                commands = attaching.end(router) if happening == "ended" else attaching.time_out(router)
            case _:
                continue
        wanted = frozenset[str]().union(*names.values())
        for command in commands:
            match command:
                case Dial(router, address):
                    assert address in wanted
                    streams[router] = address
                case Redial(address):
                    redials.append(address)
                case Close(router):
                    del streams[router]
        under_way = Counter([*streams.values(), *redials])
        assert all(under_way[address] == 1 for address in wanted)
        assert max(under_way.values(), default=1) == 1
