"""A step from its planning until it is committed, and what it will have added to its sequences. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.engine.pages import Pages
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk
from pdserve.ids import PageId


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
