"""Bugs on purpose in who attaches to whom: roster, dialling, attaching, and the router's dispatcher."""

from collections.abc import Iterator

from breaking import Original, breaks, mutation, wrap

from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer import dialling, roster, session
from pdserve.kvtransfer.doors import ReceiverLost
from pdserve.kvtransfer.session import FromSender, Hello, HelloAck, Introduction
from pdserve.router import dispatcher
from pdserve.router.requests.events import LinkLost
from pdserve.worker import attaching
from pdserve.worker.messages import RouterLost

# ---- who fits together


@mutation
def answer_whoever_means_another_incarnation() -> Iterator[object]:
    def check(original: Original, hello: Hello, me: Introduction, mover: str) -> None:
        there = Hello(hello.me, hello.mover, me.peer.incarnation, hello.age_s)
        original(there, me, mover)

    with wrap(session, "check_hello", check), wrap(roster, "check_hello", check) as patched:
        yield patched


@mutation
def work_with_whoever_answers() -> Iterator[object]:
    def check(original: Original, ack: HelloAck, me: Introduction, dialled: Peer) -> None:
        original(ack, me, ack.me.peer)

    with wrap(session, "check_ack", check), wrap(dialling, "check_ack", check) as patched:
        yield patched


# ---- dialling


@breaks(dialling.Dialling, "send")
def drop_what_is_said_before_a_stream_is_attached(
    original: Original, self: dialling.Dialling, peer: Peer, key: AttemptKey, message: FromSender
) -> list[dialling.Command]:
    stream = self._streams.get(peer)
    return original(self, peer, key, message) if stream is not None and stream.is_attached else []


@breaks(dialling.Dialling, "end")
def end_a_dialled_stream_in_silence(original: Original, *args: object) -> list[dialling.Command]:
    return [command for command in original(*args) if not isinstance(command, ReceiverLost)]


# ---- attaching


@breaks(attaching.Attaching, "end")
def dial_a_lost_router_no_more(original: Original, *args: object) -> list[attaching.Command]:
    return [command for command in original(*args) if not isinstance(command, attaching.Redial)]


@breaks(attaching.Attaching, "end")
def keep_what_a_lost_router_asked_for(original: Original, *args: object) -> list[attaching.Command]:
    return [command for command in original(*args) if not isinstance(command, RouterLost)]


# ---- the dispatcher


@breaks(dispatcher.Dispatcher, "handle")
def set_no_alarm_while_one_is_set(
    original: Original, self: dispatcher.Dispatcher[dispatcher.Answer], *args: object
) -> Iterator[dispatcher.Command]:
    """Sleep on when the core wants to be woken earlier."""
    set_s = self._alarm_s
    for command in original(self, *args):
        if isinstance(command, dispatcher.SetAlarm) and set_s is not None and self._alarm_s is not None:
            self._alarm_s = set_s
            continue
        yield command


@breaks(dispatcher.Dispatcher, "_decide")
def say_nothing_of_a_lost_link(
    original: Original, self: dispatcher.Dispatcher[dispatcher.Answer], event: object, now_s: float
) -> list[object]:
    return [] if isinstance(event, LinkLost) else original(self, event, now_s)
