"""A matcher that lets an answer be one of a few lists of tokens, and nothing else."""

from collections.abc import Sequence

from pdserve.base.errors import GrammarError
from pdserve.engine.masks import packed
from pdserve.engine.step import Bits


class Listed:
    def __init__(self, answers: set[tuple[int, ...]], vocab_size: int, *, is_ready: bool = True) -> None:
        """`answers`: with the end that each has."""
        self.answers = answers
        self.is_ready = is_ready
        self._vocab_size = vocab_size

    def following(self, output_ids: Sequence[int]) -> set[int]:
        length = len(output_ids)
        return {answer[length] for answer in self.answers if answer[:length] == tuple(output_ids) != answer}

    def fill(self, output_ids: Sequence[int], bits: Bits) -> None:
        if not (following := self.following(output_ids)):
            raise GrammarError("nothing follows")
        bits[:] = packed(list(following), self._vocab_size)
