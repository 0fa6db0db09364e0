"""A step from its planning until it is committed, and what it adds to sequences or splits them into. Pure."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from pdserve.engine.pages import PagePool, Pages
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk
from pdserve.ids import PageId
from pdserve.sampling import SampledToken


def split(pool: PagePool, sequence: Sequence, tails: Iterable[tuple[int, Seq[SampledToken]]]) -> list[Sequence]:
    """Return a sequence for each (index, tokens that follow), all of which share the pages of this one.

    The first takes over its hold on them; without tails it keeps its pages. A shared page is copied before one of
    them writes into it.
    """
    children: list[Sequence] = []
    for index, tokens in tails:
        if children:
            pool.share(sequence.pages)
        child = Sequence(
            job=sequence.job,
            indices=(index,),
            tokens=list(sequence.tokens),
            order=sequence.order,
            computed=sequence.computed,
            pages=list(sequence.pages),
            num_published=sequence.num_published,
            num_cached_tokens=sequence.num_cached_tokens,
            has_run=sequence.has_run,
            logprobs=list(sequence.logprobs),
        )
        for token in tokens:
            child.append(token)
        child.prefix.hashes += sequence.prefix.hashes
        children.append(child)
    if children:
        sequence.forget_pages()
    return children


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step that may still run adds to one of its sequences."""

    place: int  # of the sequence's chunk in the step
    num_tokens: int  # computed
    num_sampled: int  # 0 or 1

    def lets_follow(self, sequence: Sequence, max_model_len: int) -> bool:
        """Return whether more of the sequence can be planned before the step's tokens are known."""
        if not self.num_sampled:
            return True
        return not (sequence.ends_with_prompt or sequence.needs_output or sequence.is_next_last(max_model_len))


_NONE = Progress(0, 0, 0)


@dataclass(slots=True, eq=False)
class RunningStep:
    """Chunks and page copies; sequences are parallel to the chunks."""

    before: Mapping[Sequence, Progress]  # by the step that was running when this one was planned
    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[PageId, PageId]] = field(default_factory=list)  # (from, to)
    dropped: set[Sequence] = field(default_factory=set)  # stopped since: what it brings them is not wanted
    leaving: list[Pages] = field(default_factory=list)  # holds to give up when it is over

    def add(self, sequence: Sequence, chunk: Chunk) -> None:
        self.sequences.append(sequence)
        self.chunks.append(chunk)

    @property
    def num_prompt_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks if len(chunk.token_ids) > 1])

    def progress_before(self, sequence: Sequence) -> Progress:
        return self.before.get(sequence, _NONE)

    def progress(self) -> dict[Sequence, Progress]:
        """Return what the step will have added to each of its sequences."""
        pairs = enumerate(zip(self.sequences, self.chunks, strict=True))
        return {s: Progress(place, len(chunk.token_ids), 1 if chunk.samples else 0) for place, (s, chunk) in pairs}
