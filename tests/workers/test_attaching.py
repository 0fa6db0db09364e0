"""A worker's streams to its routers: dialled, given up, and dialled again."""

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
    assert attaching.handle(Due("r0")) == (Dial(FIRST, "r0", WELCOME_TIMEOUT_S),)
    return attaching


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


def backoffs_s(attaching: Attaching, count: int) -> list[float]:
    """Return how long is waited after each of so many tries that fail."""
    waited_s = []
    for _ in range(count):
        (dial,) = attaching.handle(Due("r0"))
        assert isinstance(dial, Dial)
        *_, redial = attaching.handle(Ended(dial.router, "refused"))
        assert isinstance(redial, Redial)
        waited_s.append(redial.delay_s)
    return waited_s


def test_a_router_is_dialled_more_and_more_slowly_until_it_answers() -> None:
    attaching = Attaching(jitter=lambda: 1.0)
    waited_s = backoffs_s(attaching, 6)
    assert waited_s[:2] == [MIN_BACKOFF_S, 2 * MIN_BACKOFF_S]
    assert waited_s[-2:] == [MAX_BACKOFF_S, MAX_BACKOFF_S]
    (dial,) = attaching.handle(Due("r0"))
    assert isinstance(dial, Dial)
    attaching.handle(Welcomed(dial.router))
    attaching.handle(Ended(dial.router, "reset"))
    assert backoffs_s(attaching, 1) == [2 * MIN_BACKOFF_S]


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
