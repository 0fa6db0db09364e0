"""What rank 0 and the processes of other ranks say to each other about steps.

A step is its plan without what only rank 0 does: no sampling parameters, no texts. Page copies are told to ranks with
memory of their own.
"""

from typing import Protocol

import msgspec
import numpy as np

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.batch import Ints
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, Targets
from pdserve.kvtransfer.routes import Share
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.sampling import SamplingParams

_FOLLOWED = SampleSpec(SamplingParams(), 0, 0, (), (), forbid_stops=False, sequence=(0, 0))  # rank 0 samples


class OwnPages(msgspec.Struct, frozen=True):
    """What a rank with memory of its own has of every page."""

    share: Share
    whole: Share  # of all ranks together
    run_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.share.num_runs * self.run_bytes


class Setup(msgspec.Struct, array_like=True):
    """How a rank loads its part: the worker's settings, and what rank 0 has made of them."""

    settings: str  # of the worker, JSON
    model: str  # the path of its files
    weights_hash: str
    index: int
    size: int
    slots: int | None  # the descriptor of the memory in which ranks add, or find each other; None: over this channel
    pages: int | OwnPages  # of that of all ranks' pages; or what this rank has of them, in memory of its own
    num_pages: int | None  # None: as many as fit on each device
    has_library: bool  # rank 0, which adds as all others do
    mover: int | None = None  # the descriptor of the socket on which rank 0 drives the mover of that memory
    num_head_layers: int = 0  # of a drafting head that rank 0 has, in all ranks' pages
    host: str = ""  # where this rank's sums with those of other machines listen; empty: all are on one


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
    following: int | None = None
    continues: bool = False


class Pages(msgspec.Struct, array_like=True):
    """How many pages each rank with a device of its own is to have."""

    num_pages: int


class Step(msgspec.Struct, array_like=True):
    """A step, the copies of pages before it, or a pass in which a head guesses."""

    parts: list[Part]
    copies: list[tuple[int, int]] = []
    is_guessing: bool = False

    @property
    def has_guesses(self) -> bool:
        return any(part.continues for part in self.parts)


class Kept(msgspec.Struct, array_like=True):
    """How a step ends of a model whose layers keep states, once rank 0 has sampled: which of them are written."""

    is_failed: bool = False  # none
    num_tokens: list[int] | None = None  # those behind so many tokens of each chunk; None: of all


class Ended(msgspec.Struct, array_like=True):
    """A rank is ready, or has done its part of a step."""

    failure: str = ""  # why it could not; empty: it could
    is_refusal: bool = False  # the operator can mend it
    num_pages: int = 0  # for which a rank has room that has loaded its part on a device of its own


class Commits(Protocol):
    """A rank that has done its part of a step which another one samples."""

    def commit(self, num_kept: Ints | None) -> None: ...


def keep_states(runner: Commits, kept: Kept) -> None:
    """Write a rank's part of a step's states."""
    if not kept.is_failed:
        runner.commit(None if kept.num_tokens is None else np.array(kept.num_tokens, np.int64))


def step_of(plan: StepPlan, *, is_guessing: bool = False) -> Step:
    """Return a step as other ranks need it; InvariantError for an adapter: they would compute without it."""
    if any(chunk.adapter for chunk in plan.chunks):
        raise InvariantError("an adapter: other ranks have none")
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
            following=chunk.following,
            continues=chunk.continues,
        )
        for chunk in plan.chunks
    ]
    return Step(parts, list(plan.copies), is_guessing)


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
        following=part.following,
        continues=part.continues,
    )
