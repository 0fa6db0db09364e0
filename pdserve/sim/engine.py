"""An engine whose KV is a chain of hashes: wrong KV is a wrong token."""

import zlib
from collections.abc import Sequence

from pdserve.engine.step import Chunk, SampledToken, SampleSpec, StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.ids import PageId

EMPTY = 0  # what stands before the first token
SIZE = 8  # bytes of a slot


class FakeRunner:
    """Computes steps on bytes: the slot of a token holds a hash of that token and the slot before it."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int) -> None:
        self.memory = bytearray(num_pages * page_size * SIZE)
        self.page_bytes = page_size * SIZE
        self._page_size = page_size
        self._vocab_size = vocab_size

    def page(self, page: PageId) -> memoryview:
        """Return one page's bytes, writable."""
        return memoryview(self.memory)[page * self.page_bytes : (page + 1) * self.page_bytes]

    def run(self, plan: StepPlan) -> StepResult:
        for source, target in plan.copies:
            self.page(target)[:] = self.page(source)
        return StepResult(tuple(self._compute(chunk) for chunk in plan.chunks), 0.0)

    def _compute(self, chunk: Chunk) -> tuple[SampledToken, ...]:
        if len(chunk.pages) * self._page_size < chunk.start + len(chunk.token_ids):
            raise InvariantError("a chunk reaches beyond its pages")
        state = self._slot(chunk.pages, chunk.start - 1) if chunk.start else EMPTY
        for position, token in enumerate(chunk.token_ids, chunk.start):
            state = advance(state, token)
            begin = self._offset(chunk.pages, position)
            self.memory[begin : begin + SIZE] = state.to_bytes(SIZE, "little")
        return tuple(draw(state, spec, self._vocab_size) for spec in chunk.samples)

    def _offset(self, pages: Sequence[PageId], position: int) -> int:
        return (pages[position // self._page_size] * self._page_size + position % self._page_size) * SIZE

    def _slot(self, pages: Sequence[PageId], position: int) -> int:
        begin = self._offset(pages, position)
        return int.from_bytes(self.memory[begin : begin + SIZE], "little")


def advance(state: int, token: int) -> int:
    """Return the slot that follows `state` for a token."""
    low = zlib.crc32(token.to_bytes(4, "little"), state & 0xFFFFFFFF)
    high = zlib.crc32(low.to_bytes(4, "little"), state >> 32)
    return high << 32 | low


def draw(state: int, spec: SampleSpec, vocab_size: int) -> SampledToken:
    """Return the token that follows a context: a hash of it, the seed and the index."""
    mixed = zlib.crc32(f"{state} {spec.seed} {spec.index}".encode())
    return SampledToken(mixed % vocab_size)


def expected(prompt: Sequence[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """Return the tokens that any correct engine generates for a prompt."""
    state = EMPTY
    for token in prompt:
        state = advance(state, token)
    tokens: list[int] = []
    for index in range(count):
        tokens.append(zlib.crc32(f"{state} {seed} {index}".encode()) % vocab_size)
        state = advance(state, tokens[-1])
    return tokens
