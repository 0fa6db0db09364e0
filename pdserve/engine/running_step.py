"""A step between its planning and its commit. Pure."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pdserve.base.ids import PageId
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, Draft, Phase
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.paging import Paging


@dataclass(frozen=True, slots=True)
class Progress:
    """What a running step adds to one of its sequences."""

    place: int  # of the sequence's chunk in the step
    num_tokens: int  # computed
    num_sampled: int  # at most: 0, or 1 and one for each guess
    has_draft: bool = False  # guesses come with its result


_NONE = Progress(0, 0, 0)
_UNKNOWN = (0,)  # stands for a token that is not sampled yet


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step from its planning until it is committed. Its sequences are parallel to its chunks."""

    before: Mapping[Sequence, Progress]  # what the step adds that ran when this one was planned
    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[PageId, PageId]] = field(default_factory=list)  # (from, to)
    dropped: set[Sequence] = field(default_factory=set)  # stopped since: their results are dropped
    leaving: list[Pages] = field(default_factory=list)  # pages to release when it is over

    def add(self, sequence: Sequence, chunk: Chunk) -> None:
        self.sequences.append(sequence)
        self.chunks.append(chunk)

    @property
    def num_prompt_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks if chunk.phase is Phase.PROMPT])

    def num_rows(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence the step computes, guesses included."""
        pairs = zip(self.sequences, self.chunks, strict=True)
        return sum([len(chunk.token_ids) for each, chunk in pairs if each is sequence])

    def depends_on(self, guesses: Collection[Sequence]) -> bool:
        """Return whether to wait for the step that runs. guesses: whose guesses this step is to verify."""
        is_open = any(n.num_sampled > 1 or n.has_draft for n in self.before.values())
        return is_open or any(s in self.before for s in guesses)

    def progress_before(self, sequence: Sequence) -> Progress:
        return self.before.get(sequence, _NONE)

    def progress(self) -> dict[Sequence, Progress]:
        """Return what the step will have added to each of its sequences."""
        pairs = enumerate(zip(self.sequences, self.chunks, strict=True))
        return {
            s: Progress(
                place, len(chunk.token_ids), 1 + chunk.num_drafts if chunk.samples else 0, chunk.draft is not None
            )
            for place, (s, chunk) in pairs
        }


def next_chunk(sequence: Sequence, before: Progress, count: int, paging: Paging) -> Chunk:
    """Return the next `count` tokens of a sequence, guesses among them. before: what running steps add to it."""
    num_known, start = len(sequence.tokens), sequence.computed + before.num_tokens
    stop, is_known = start + count, start < num_known
    num_drafts = stop - num_known if is_known and stop > num_known else 0
    token_ids: Seq[int] = sequence.tokens[start:stop] if is_known else _UNKNOWN
    if num_drafts:
        token_ids = [*token_ids, *sequence.drafts[:num_drafts]]
    runs = sequence.pages.runs
    return Chunk(
        token_ids,
        start,
        pages=runs[0][: -(-(stop + sequence.guessing.num_to_draft) // paging.sizes[0])],
        samples=sequence.samples(before.num_sampled) if stop >= num_known + before.num_sampled else (),
        phase=Phase.DECODE if before.num_sampled else sequence.phase,
        previous=None if is_known else before.place,
        targets=sequence.targets(start, stop) if sequence.prompt_logprobs is not None else None,
        num_drafts=num_drafts,
        other_pages=() if len(runs) == 1 else sequence.pages.rows(paging, stop)[1:],
        adapter=sequence.job.scope.adapter,
        pooling=sequence.pooling(stop),
        draft=_draft(sequence, start) if sequence.guessing.num_to_draft else None,
        following=sequence.tokens[stop] if stop < num_known else None,
    )


def _draft(sequence: Sequence, start: int) -> Draft:
    """Return what the draft model computes after a chunk that starts there."""
    known = sequence.guessing
    stop = min(start, known.num_drafted + known.num_to_feed)
    return Draft(sequence.tokens[known.num_drafted : stop], known.num_drafted, known.num_to_draft)
