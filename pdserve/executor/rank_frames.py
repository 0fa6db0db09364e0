"""What rank 0 and the processes of other ranks say to each other, packed, and the socket that carries it.

A step is its plan without what only rank 0 does: no sampling parameters, no texts. Page copies are told to ranks with
memory of their own.
"""

import socket
import struct
from typing import TypeVar

import msgspec

from pdserve.base.ids import PageId
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, Targets
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.sampling import SamplingParams

MAX_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")
_FOLLOWED = SampleSpec(SamplingParams(), 0, 0, (), (), forbid_stops=False, sequence=(0, 0))  # rank 0 samples


class Setup(msgspec.Struct, array_like=True):
    """How a rank loads its part: the worker's settings, and what rank 0 has made of them."""

    settings: str  # of the worker, JSON
    model: str  # the path of its files
    weights_hash: str
    index: int
    size: int
    slots: int  # the descriptor of the memory in which ranks add, or by which they find each other
    pages: int | None  # and of that of pages, of all ranks or of this one; None: the rank has a device of its own
    num_pages: int | None  # None: as many as fit on each device
    has_library: bool  # rank 0, which adds as all others do


class Part(msgspec.Struct, array_like=True):
    """A chunk as a rank needs it."""

    token_ids: list[int]
    start: int
    pages: list[int]
    other_pages: list[list[int]]
    num_samples: int
    num_drafts: int
    is_prompt: bool
    targets: list[int] | None
    pooling: Pooling | None = None
    previous: int | None = None


class Pages(msgspec.Struct, array_like=True):
    """How many pages each rank with a device of its own is to have."""

    num_pages: int


class Step(msgspec.Struct, array_like=True):
    """A step, or the copies of pages before it."""

    parts: list[Part]
    copies: list[tuple[int, int]] = []


class Ended(msgspec.Struct, array_like=True):
    """A rank is ready, or has done its part of a step."""

    failure: str = ""  # why it could not; empty: it could
    is_refusal: bool = False  # the operator can mend it
    num_pages: int = 0  # for which a rank has room that has loaded its part on a device of its own


Message = TypeVar("Message", Setup, Pages, Step, Ended, bytes)


class Channel:
    """One end of the socket between rank 0 and another one; each message is read by one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: Setup | Pages | Step | Ended | bytes) -> None:
        """Send a message; OSError where the other end is gone."""
        packed = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(packed)) + packed)

    def limit(self, seconds: float | None) -> None:
        """Raise TimeoutError where a message takes longer; the channel is of no use then. None: wait for ever."""
        self._socket.settimeout(seconds)

    def receive(self, kind: type[Message]) -> Message:
        """Wait for a message; EOFError at the end of the stream, OSError where the other end is gone."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return msgspec.msgpack.decode(self._exactly(min(length, MAX_BYTES)), type=kind)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, count: int) -> bytearray:
        received = bytearray(count)
        view = memoryview(received)
        while view:
            length = self._socket.recv_into(view)
            if not length:
                raise EOFError
            view = view[length:]
        return received


def step_of(plan: StepPlan) -> Step:
    """Return a step as other ranks need it."""
    parts = [
        Part(
            token_ids=list(chunk.token_ids),
            start=chunk.start,
            pages=list(chunk.pages),
            other_pages=[list(pages) for pages in chunk.other_pages],
            num_samples=len(chunk.samples),
            num_drafts=chunk.num_drafts,
            is_prompt=chunk.phase is Phase.PROMPT,
            targets=None if chunk.targets is None else list(chunk.targets.token_ids),
            pooling=chunk.pooling,
            previous=chunk.previous,
        )
        for chunk in plan.chunks
    ]
    return Step(parts, list(plan.copies))


def plan_of(step: Step) -> StepPlan:
    """Return what a rank computes of such a step."""
    copies = tuple([(PageId(source), PageId(target)) for source, target in step.copies])
    return StepPlan(tuple([_chunk(part) for part in step.parts]), copies)


def _chunk(part: Part) -> Chunk:
    return Chunk(
        token_ids=part.token_ids,
        start=part.start,
        pages=[PageId(page) for page in part.pages],
        samples=(_FOLLOWED,) * part.num_samples,
        phase=Phase.PROMPT if part.is_prompt else Phase.DECODE,
        targets=None if part.targets is None else Targets(part.targets, 0),
        num_drafts=part.num_drafts,
        other_pages=tuple([[PageId(page) for page in pages] for pages in part.other_pages]),
        pooling=part.pooling,
        previous=part.previous,
    )
