"""What rank 0 orders of the mover of another rank, and what that one reports."""

from typing import Literal

import msgspec

from pdserve.base.errors import ConfigError, InvariantError, ProtocolError
from pdserve.base.ids import AttemptKey, Peer
from pdserve.kvtransfer.doors import CopyStopped
from pdserve.kvtransfer.session import Digests
from pdserve.protocol.page_tables import Pages

Whose = Literal["operator", "peer", "own"]


class Message(msgspec.Struct, tag=True, array_like=True):
    pass


class Write(Message):
    """Copy pages; Stopped follows."""

    peer: Peer
    handoff: AttemptKey
    src: Pages
    dst: Pages


class Cancel(Message):
    peer: Peer
    handoff: AttemptKey


class Forget(Message):
    peer: Peer


class Call(Message):
    """An order that is answered."""

    number: int


class Begin(Call):
    """Start the mover."""

    me: Peer


class Attach(Call):
    peer: Peer
    description: bytes


class TakeDigests(Call):
    pages: Pages


class Settle(Call):
    ended: Peer


class Look(Call):
    """Say how the mover's thread gets on."""


class Close(Call):
    """Close the mover: the last order."""


class Stopped(Message):
    """What became of a copy."""

    peer: Peer
    handoff: AttemptKey
    ended: CopyStopped


class Answer(Message):
    number: int = 0  # of the call
    description: bytes = b""
    digests: Digests = ()
    turn: int | None = None
    stalled: tuple[Peer, ...] = ()
    problem: str = ""  # why the call has failed; empty: it has not
    whose: Whose = "own"  # who can mend that


Order = Write | Cancel | Forget | Begin | Attach | TakeDigests | Settle | Look | Close
Report = Stopped | Answer
Error = ConfigError | ProtocolError | InvariantError
ERRORS: dict[Whose, type[Error]] = {"operator": ConfigError, "peer": ProtocolError, "own": InvariantError}
