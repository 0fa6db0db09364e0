"""The first message of each end of a hand-off stream, and whether the two processes fit together. Pure.

Invariant: two processes attach only if each is the one that the other means, they lay out their pages alike, and they
use the same mover.
"""

from dataclasses import dataclass

from pdserve.errors import ProtocolError, Refusal
from pdserve.ids import Incarnation
from pdserve.kvlayout import KvLayout
from pdserve.kvtransfer.session import Peer


@dataclass(frozen=True, slots=True)
class Introduction:
    """Which process it is, and how its pages are laid out."""

    peer: Peer
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of the process that dials."""

    me: Introduction
    mover: str
    decode_incarnation: Incarnation  # of the process that it means to reach
    age_s: float  # of its process


@dataclass(frozen=True, slots=True)
class HelloAck:
    """The first message of the process that was dialled."""

    me: Introduction
    mover_metadata: bytes  # what it takes to write into its pages


def check_hello(hello: Hello, me: Introduction, mover: str) -> None:
    """Raise ProtocolError, which names what differs, unless a process that dials fits this one."""
    if hello.decode_incarnation != me.peer.incarnation:
        text = f"decode_incarnation: {hello.decode_incarnation:016x}, here is {me.peer.incarnation:016x}"
        raise ProtocolError(text, Refusal.INCARNATION)
    _check_layouts(hello.me.layout, me.layout)
    if hello.mover != mover:
        raise ProtocolError(f"mover: {hello.mover} there, {mover} here", Refusal.MOVER)


def check_ack(ack: HelloAck, me: Introduction, dialled: Peer) -> None:
    """Raise ProtocolError, which names what differs, unless the process that answers is the one that was dialled."""
    if ack.me.peer != dialled:
        text = f"worker_id: {ack.me.peer.worker_id} answers for {dialled.worker_id}"
        raise ProtocolError(text, Refusal.INCARNATION)
    _check_layouts(me.layout, ack.me.layout)


def _check_layouts(source: KvLayout, target: KvLayout) -> None:
    difference = source.difference(target)
    if difference is not None:
        raise ProtocolError(f"layout.{difference}", Refusal.LAYOUT)
