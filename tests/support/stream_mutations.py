"""Bugs on purpose in the machines of the streams: greeting, roster, dialling, attaching, and the router's desk."""

from collections.abc import Iterator

from breaking import Original, mutation, wrap

from pdserve.kvtransfer import dialling, greeting, roster
from pdserve.kvtransfer.doors import PeerGone, ReceiverLost
from pdserve.kvtransfer.session import FromSender, HandoffKey, Peer
from pdserve.router import desk
from pdserve.router.events import LinkLost
from pdserve.worker import attaching
from pdserve.worker.messages import RouterLost

# ---- greeting


@mutation
def answer_whoever_means_another_incarnation() -> Iterator[object]:
    def check(original: Original, hello: greeting.Hello, me: greeting.Introduction, mover: str) -> None:
        there = greeting.Hello(hello.me, hello.mover, me.peer.incarnation, hello.age_s)
        original(there, me, mover)

    with wrap(greeting, "check_hello", check), wrap(roster, "check_hello", check) as patched:
        yield patched


@mutation
def work_with_whoever_answers() -> Iterator[object]:
    def check(original: Original, ack: greeting.HelloAck, me: greeting.Introduction, dialled: Peer) -> None:
        original(ack, me, ack.me.peer)

    with wrap(greeting, "check_ack", check), wrap(dialling, "check_ack", check) as patched:
        yield patched


# ---- roster


@mutation
def take_a_process_that_is_followed_for_ended() -> Iterator[object]:
    """Believe that the earlier process of a worker has ended, though it is attached, or has spoken since."""

    def succeed(original: Original, self: roster.Roster, earlier: Peer, **_: bool) -> tuple[roster.Command, ...]:
        commands = original(self, earlier, has_spoken=False)
        return commands if PeerGone(earlier) in commands else (*commands, PeerGone(earlier))

    with wrap(roster.Roster, "_succeed", succeed) as patched:
        yield patched


@mutation
def let_processes_attach_in_any_order() -> Iterator[object]:
    with wrap(roster.Roster, "_check_order", lambda original, self, peer: None) as patched:
        yield patched


# ---- dialling


@mutation
def drop_what_is_said_before_a_stream_is_attached() -> Iterator[object]:
    def say(
        original: Original, self: dialling.Dialling, stream: object, key: HandoffKey, message: FromSender
    ) -> tuple[dialling.Command, ...]:
        return original(self, stream, key, message) if getattr(stream, "is_attached", False) else ()

    with wrap(dialling.Dialling, "_say", say) as patched:
        yield patched


@mutation
def end_a_dialled_stream_in_silence() -> Iterator[object]:
    def end(original: Original, *args: object) -> tuple[dialling.Command, ...]:
        return tuple(command for command in original(*args) if not isinstance(command, ReceiverLost))

    with wrap(dialling.Dialling, "_end", end) as patched:
        yield patched


# ---- attaching


@mutation
def dial_a_lost_router_no_more() -> Iterator[object]:
    def lose(original: Original, *args: object) -> tuple[attaching.Command, ...]:
        return tuple(command for command in original(*args) if not isinstance(command, attaching.Redial))

    with wrap(attaching.Attaching, "_lose", lose) as patched:
        yield patched


@mutation
def keep_what_a_lost_router_asked_for() -> Iterator[object]:
    def lose(original: Original, *args: object) -> tuple[attaching.Command, ...]:
        return tuple(command for command in original(*args) if not isinstance(command, RouterLost))

    with wrap(attaching.Attaching, "_lose", lose) as patched:
        yield patched


# ---- the desk


@mutation
def set_no_alarm_while_one_is_set() -> Iterator[object]:
    """Sleep on when the core wants to be woken earlier."""

    def handle(original: Original, self: desk.Desk[desk.Answer], *args: object) -> Iterator[desk.Command]:
        set_s = self._alarm_s
        for command in original(self, *args):
            if isinstance(command, desk.SetAlarm) and set_s is not None and self._alarm_s is not None:
                self._alarm_s = set_s
                continue
            yield command

    with wrap(desk.Desk, "handle", handle) as patched:
        yield patched


@mutation
def say_nothing_of_a_lost_link() -> Iterator[object]:
    def decide(original: Original, self: desk.Desk[desk.Answer], event: object, now_s: float) -> list[object]:
        return [] if isinstance(event, LinkLost) else original(self, event, now_s)

    with wrap(desk.Desk, "_decide", decide) as patched:
        yield patched
