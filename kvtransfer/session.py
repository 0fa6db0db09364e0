"""What the two processes of a hand-off send each other: first who they are, then the messages of each hand-off.

Invariant: two processes attach only if each is the one that the other means, they lay out their pages alike, and they
use the same mover. The halves of a hand-off are `sender.Sender` and `receiver.Receiver`.
"""

import hmac
from collections.abc import Sequence
from struct import pack

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import AttemptKey, Generation, Incarnation, Peer
from pdserve.base.values import value
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.sampling import SampledToken

Digests = tuple[int, ...]  # 64 bits a page
CAPABILITY_BYTES = 16
MIN_LEASE_S = 1.0  # two heartbeats: no sender can keep a shorter lease


@value
class Introduction:
    """Which process it is, and how its pages are laid out."""

    peer: Peer
    layout: KvLayout


@value
class Hello:
    """The first message of the process that dials."""

    me: Introduction
    mover: str
    decode_incarnation: Incarnation  # of the process that it means to reach
    age_s: float  # of its process


@value
class HelloAck:
    """The first message of the process that was dialled."""

    me: Introduction
    mover_metadata: bytes  # what it takes to write into its pages


@value
class Grant:
    """Room on the decode worker. `pages` stand for the prompt's pages from `first_page` on, in order."""

    first_page: int  # leading pages the decode worker already holds; these are not sent
    pages: Pages
    generations: tuple[Generation, ...]
    capability: bytes
    lease_s: float  # how long the sender may be silent before the grant is given up


@value
class Tail:
    """The tokens of one continuation that follow those of its job. After a prompt it is the first token."""

    index: int
    tokens: tuple[SampledToken, ...]


@value
class Capsule:
    """State of a request when its pages change hands: what the receiver needs besides the pages.

    Without tails, the pages are of a prefix, and no sequence goes on with them.
    """

    num_tokens: int  # tokens whose KV is in the pages: with tails, all but each one's last token
    tails: tuple[Tail, ...]  # one of each continuation that goes on


@value
class PagesLanded:
    """The next pages of a grant, in its order, have been written."""

    digests: Digests  # of whole pages, whose parts the ranks of the sender have written


@value
class Commit:
    """Every write has landed. The grant's leading pages have the capsule's tokens; the rest was not written."""

    capability: bytes  # of the grant, and of no other
    capsule: Capsule
    handoff_s: float = 0.0  # from the first moment it could be sent until it had landed; for the request's ledger


@value
class Quiesced:
    """No copy of the sender is or will be under way."""

    reason: str


@value
class Taken:
    """The receiver owns the sequence."""


@value
class Withdrawn:
    """The receiver has given up, and waits for the sender to quiesce."""

    reason: str


FromSender = PagesLanded | Commit | Quiesced
FromReceiver = Grant | Taken | Withdrawn


def check_hello(hello: Hello, me: Introduction, mover: str) -> None:
    """Raise ProtocolError, which names what differs, unless a process that dials fits this one."""
    if hello.decode_incarnation != me.peer.incarnation:
        text = f"decode_incarnation: {hello.decode_incarnation:016x}, here is {me.peer.incarnation:016x}"
        raise ProtocolError(text, PeerFault.INCARNATION)
    _check_layouts(hello.me.layout, me.layout)
    if hello.mover != mover:
        raise ProtocolError(f"mover: {hello.mover} there, {mover} here", PeerFault.MOVER)


def check_ack(ack: HelloAck, me: Introduction, dialled: Peer) -> None:
    """Raise ProtocolError, which names what differs, unless the process that answers is the one that was dialled."""
    if ack.me.peer != dialled:
        text = f"worker_id: {ack.me.peer.worker_id} answers for {dialled.worker_id}"
        raise ProtocolError(text, PeerFault.INCARNATION)
    _check_layouts(me.layout, ack.me.layout)


def _check_layouts(source: KvLayout, target: KvLayout) -> None:
    difference = source.difference(target)
    if difference is not None:
        raise ProtocolError(f"layout.{difference}", PeerFault.LAYOUT)


def of_parts(digests: Sequence[Digests]) -> Digests:
    """Return the digests of pages from those of their parts, which add (`xxh3_runs`), whoever holds which part."""
    return tuple([sum(page) % (1 << 64) for page in zip(*digests, strict=True)])


def mint_capability(key: bytes, handoff: AttemptKey, pages: Pages, generations: tuple[Generation, ...]) -> bytes:
    """Return the token that proves a grant of exactly these pages in these generations: HMAC-SHA256, cut to 128 bits.

    `key` is random per decode process and never leaves it. Every field has a fixed width, so no two grants share one.
    """
    numbers = [0] * (2 * len(pages))
    numbers[::2], numbers[1::2] = pages, generations
    name = handoff.request_id + handoff.attempt.to_bytes(4, "big")
    return hmac.digest(key, name + pack(f">{len(numbers)}Q", *numbers), "sha256")[:CAPABILITY_BYTES]
