"""A worker's streams to its routers: dialled, given up, and dialled again."""

from collections import Counter

from hypothesis import given
from hypothesis.strategies import DataObject, builds, data, frozensets, lists, sampled_from

from pdserve.worker.attaching import (
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    WELCOME_TIMEOUT_S,
    Attaching,
    Close,
    Dial,
    Due,
    Ended,
    EndProcess,
    Finish,
    Found,
    Left,
    Redial,
    Register,
    TimedOut,
    Welcomed,
)
from pdserve.worker.messages import RouterLost, RouterRef

FIRST, SECOND = RouterRef(1), RouterRef(2)
LOST = Close(FIRST), RouterLost(FIRST)


def dialled() -> Attaching:
    attaching = Attaching(jitter=lambda: 1.0)
    assert attaching.handle(found("r0")) == (Dial(FIRST, "r0", WELCOME_TIMEOUT_S),)
    return attaching


def found(*addresses: str, name: str = "routers") -> Found:
    return Found(name, frozenset(addresses))


def attached() -> Attaching:
    attaching = dialled()
    assert attaching.handle(Welcomed(FIRST)) == (Register(FIRST),)
    assert attaching.attached == (FIRST,)
    return attaching


def test_a_lost_router_is_reported_once_and_dialled_again() -> None:
    attaching = attached()
    assert attaching.handle(Ended(FIRST, "reset")) == (*LOST, Redial("r0", MIN_BACKOFF_S))
    assert attaching.handle(Ended(FIRST, "late")) == ()
    assert attaching.attached == ()
    assert attaching.handle(Due("r0")) == (Dial(SECOND, "r0", WELCOME_TIMEOUT_S),)


def test_a_router_that_does_not_welcome_in_time_is_given_up() -> None:
    assert dialled().handle(TimedOut(FIRST)) == (*LOST, Redial("r0", MIN_BACKOFF_S))
    assert attached().handle(TimedOut(FIRST)) == ()


def backoffs_s(attaching: Attaching, first: int, count: int) -> list[float]:
    """Return how long is waited after each of so many tries that fail; the next one is under way then."""
    waited_s = []
    for router in range(first, first + count):
        *_, redial = attaching.handle(Ended(RouterRef(router), "refused"))
        assert isinstance(redial, Redial)
        waited_s.append(redial.delay_s)
        assert attaching.handle(Due("r0")) == (Dial(RouterRef(router + 1), "r0", WELCOME_TIMEOUT_S),)
    return waited_s


def test_a_router_is_dialled_more_and_more_slowly_until_it_answers() -> None:
    attaching = dialled()
    waited_s = backoffs_s(attaching, 1, 6)
    assert waited_s[:2] == [MIN_BACKOFF_S, 2 * MIN_BACKOFF_S]
    assert waited_s[-2:] == [MAX_BACKOFF_S, MAX_BACKOFF_S]
    attaching.handle(Welcomed(RouterRef(7)))
    assert backoffs_s(attaching, 7, 2) == [MIN_BACKOFF_S, 2 * MIN_BACKOFF_S]


def test_a_router_that_dismisses_this_process_is_dialled_no_more() -> None:
    for attaching in (dialled(), attached()):
        close, end = attaching.handle(Ended(FIRST, "there is a later one", is_dismissal=True))
        assert close == Close(FIRST)
        assert end == EndProcess("router r0 refuses this process: there is a later one")


def test_a_worker_that_leaves_ends_streams_in_order_and_dials_no_more() -> None:
    attaching = attached()
    assert attaching.handle(Left()) == (Finish(FIRST),)
    assert attaching.handle(Ended(FIRST, "it ended the stream")) == LOST
    assert attaching.handle(Due("r0")) == ()
    assert dialled().handle(Left()) == LOST


def test_a_router_that_a_name_leads_to_later_is_dialled_beside_those_that_are_attached() -> None:
    attaching = attached()
    assert attaching.handle(found("r0", "r1")) == (Dial(SECOND, "r1", WELCOME_TIMEOUT_S),)
    assert attaching.handle(found("r0", "r1")) == ()
    assert attaching.handle(found("r1", name="another name of it")) == ()
    attaching.handle(Welcomed(SECOND))
    assert attaching.attached == (FIRST, SECOND)


def test_a_router_that_no_name_leads_to_stays_attached_until_its_link_is_lost() -> None:
    attaching = attached()
    assert attaching.handle(found()) == ()
    assert attaching.attached == (FIRST,)
    assert attaching.handle(Ended(FIRST, "reset")) == (*LOST, Redial("r0", MIN_BACKOFF_S))
    assert attaching.handle(Due("r0")) == ()
    assert attaching.handle(found("r0")) == (Dial(SECOND, "r0", WELCOME_TIMEOUT_S),)


def test_a_router_of_another_name_stays() -> None:
    attaching = attached()
    attaching.handle(found("r0", name="another name of it"))
    attaching.handle(found())
    attaching.handle(Ended(FIRST, "reset"))
    assert attaching.handle(Due("r0")) == (Dial(SECOND, "r0", WELCOME_TIMEOUT_S),)


NAMES, ADDRESSES = ("n0", "n1"), ("r0", "r1")
FOUND = builds(Found, sampled_from(NAMES), frozensets(sampled_from(ADDRESSES)))
HAPPENINGS = sampled_from(("due", "welcomed", "timed out", "ended"))


@given(lists(FOUND | HAPPENINGS, max_size=60), data())
def test_each_address_that_a_name_leads_to_has_one_stream_or_one_redial(
    happenings: list[Found | str], choice: DataObject
) -> None:
    attaching, streams, redials = Attaching(jitter=lambda: 1.0), dict[RouterRef, str](), list[str]()
    names: dict[str, frozenset[str]] = {}
    for happening in happenings:
        match happening:
            case Found(name, addresses):
                names[name] = addresses
                commands = attaching.handle(happening)
            case "due" if redials:
                address = choice.draw(sampled_from(redials))
                redials.remove(address)
                commands = attaching.handle(Due(address))
            case "welcomed" | "timed out" | "ended" if streams:
                router = choice.draw(sampled_from(sorted(streams)))
                events = {"welcomed": Welcomed(router), "timed out": TimedOut(router), "ended": Ended(router, "reset")}
                commands = attaching.handle(events[happening])
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
