"""Leases of peers: who is silent for too long, and who only seems so."""

from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.decode_worker.granting import Leases

LEASE_S = 4.0
P, Q = Peer(WorkerId("p"), Incarnation(1)), Peer(WorkerId("q"), Incarnation(2))


def begun(*peers: Peer) -> Leases:
    leases = Leases(LEASE_S)
    for peer in peers:
        leases.begin(peer, 0.0)
    return leases


def test_a_lease_lapses_once_after_its_length_in_silence() -> None:
    leases = begun(P, Q)
    assert not leases.renew(Q, 1.0)
    assert leases.take_lapsed(3.9) == ()
    assert leases.take_lapsed(4.5) == ((P, "lease of 4 s lapsed: silent for 4.5 s"),)
    assert leases.take_lapsed(4.9) == ()
    assert not leases.holds(P)
    assert leases.holds(Q)


def test_a_word_after_the_lapse_begins_the_lease_anew() -> None:
    leases = begun(P)
    leases.take_lapsed(4.0)
    assert leases.renew(P, 9.0)
    assert not leases.renew(P, 9.5)
    assert leases.holds(P)


def test_a_word_of_a_peer_whose_stream_has_ended_begins_nothing() -> None:
    leases = begun(P)
    leases.end(P)
    assert not leases.renew(P, 1.0)
    assert not leases.holds(P)


def test_time_in_which_nobody_could_be_heard_is_nobodys_silence() -> None:
    leases = begun(P, Q)
    leases.renew(Q, 30.0)  # what had waited was read before the sleep was noticed
    leases.excuse(29.0, 30.0)
    assert leases.take_lapsed(32.9) == ()
    assert [peer for peer, _ in leases.take_lapsed(33.0)] == [P]
    assert [peer for peer, _ in leases.take_lapsed(34.0)] == [Q]


@given(st.lists(st.floats(0.01, 3.99), max_size=50))
def test_a_peer_that_speaks_often_enough_never_lapses(gaps_s: list[float]) -> None:
    leases, now_s = begun(P), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        assert leases.take_lapsed(now_s) == ()
        leases.renew(P, now_s)
