"""How guesses turned out: of one step, and over many, by where they came from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.base.values import value

MAX_DRAFT_TOKENS = 15  # of a sequence in a step: with its own token so many rows as the kernels' tiles take together


class DraftSource(StrEnum):
    """Where guesses come from. In link.proto they have the same names."""

    NGRAM = "ngram"  # the sequence itself
    SUFFIX = "suffix"  # recent answers
    DRAFT_MODEL = "draft_model"
    EAGLE3 = "eagle3"
    MTP = "mtp"


@value
class Verified:
    """The guesses that one step verified for a sequence. The first `num_accepted_tokens` were right, and are kept."""

    source: DraftSource
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(slots=True)
class Acceptance:
    """How the guesses of one source turned out; by vLLM's names."""

    num_drafts: int = 0  # steps of a sequence that verified some
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    def note(self, verified: Verified) -> None:
        """Count the guesses of a step."""
        self.num_drafts += 1
        self.num_draft_tokens += verified.num_draft_tokens
        by_place = self.num_accepted_tokens_per_pos
        for place in range(verified.num_accepted_tokens):
            if place == len(by_place):
                by_place.append(0)
            by_place[place] += 1

    def add(self, other: "Acceptance") -> None:
        """Count what another one has counted."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        mine += [0] * (len(theirs) - len(mine))
        for place, count in enumerate(theirs):
            mine[place] += count


BySource = dict[str, Acceptance]


def count(counted: BySource, verified: Iterable[Verified]) -> None:
    """Count the guesses of steps."""
    for each in verified:
        source = each.source.value
        if source not in counted:
            counted[source] = Acceptance()
        counted[source].note(each)


def add(counted: BySource, others: BySource) -> None:
    """Count what others have counted."""
    for source, other in others.items():
        counted.setdefault(source, Acceptance()).add(other)
