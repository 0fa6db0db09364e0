"""Steps that are planned and not committed, and what they will have brought: for planning the step after. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.engine.pages import Pages
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step that may be running."""

    sequences: list[Sequence]  # parallel to the chunks
    chunks: tuple[Chunk, ...]
    dropped: set[Sequence] = field(default_factory=set)  # stopped since: what it brings them is not wanted
    leaving: list[Pages] = field(default_factory=list)  # holds to give up when it is over

    def shares(self) -> dict[Sequence, "Share"]:
        """Return what the step will have brought each of its sequences."""
        pairs = enumerate(zip(self.sequences, self.chunks, strict=True))
        return {s: Share(place, len(chunk.token_ids), 1 if chunk.samples else 0) for place, (s, chunk) in pairs}


@dataclass(frozen=True, slots=True)
class Share:
    place: int  # of the sequence's chunk in the step
    num_tokens: int  # computed
    num_drawn: int  # 0 or 1


Shares = Mapping[Sequence, Share]
NO_SHARE = Share(0, 0, 0)


def may_follow(sequence: Sequence, share: Share, max_model_len: int) -> bool:
    """Return whether more of a sequence can be planned before the tokens of the running step are known."""
    if not share.num_drawn:
        return True
    return not (sequence.ends_with_prompt or sequence.has_penalties or sequence.is_next_last(max_model_len))
