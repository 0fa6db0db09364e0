"""An engine whose KV is a chain of hashes, and whose tokens are hashes of all of it: wrong KV is a wrong token."""

from collections.abc import Sequence
from zlib import crc32

from pdserve.engine.step import Chunk, SampledToken, StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.ids import PageId

EMPTY = 0  # what stands before the first token
SIZE = 4  # bytes of a slot


class FakeRunner:
    """Computes steps on bytes: the slot of a token holds a hash of that token and the slot before it."""

    def __init__(self, num_pages: int, page_size: int, vocab_size: int) -> None:
        self.page_bytes = page_size * SIZE
        self._pages = [bytearray(self.page_bytes) for _ in range(num_pages)]
        self._page_size = page_size
        self._vocab_size = vocab_size

    def page(self, page: PageId) -> bytearray:
        """Return one page's bytes, to be changed in place."""
        return self._pages[page]

    def run(self, plan: StepPlan) -> StepResult:
        for source, target in plan.copies:
            self._pages[target][:] = self._pages[source]
        return StepResult(tuple([self._compute(chunk) for chunk in plan.chunks]), 0.0)

    def _compute(self, chunk: Chunk) -> tuple[SampledToken, ...]:
        if len(chunk.pages) * self._page_size < chunk.start + len(chunk.token_ids):
            raise InvariantError("a chunk reaches beyond its pages")
        pages, begin = [self._pages[page] for page in chunk.pages], chunk.start * SIZE
        before = b"".join(pages)[:begin]
        state = int.from_bytes(before[-SIZE:], "little") if before else EMPTY
        fresh = chain(state, chunk.token_ids)
        self._write(pages, begin, fresh)
        if not chunk.samples:
            return ()
        context = crc32(fresh, crc32(before))
        vocab_size = self._vocab_size
        return tuple([SampledToken(_token(context, spec.seed, spec.index, vocab_size)) for spec in chunk.samples])

    def _write(self, pages: Sequence[bytearray], begin: int, fresh: bytes) -> None:
        """Write bytes from an offset on into pages that follow each other."""
        number, offset = divmod(begin, self.page_bytes)
        while fresh:
            part, fresh = fresh[: self.page_bytes - offset], fresh[self.page_bytes - offset :]
            pages[number][offset : offset + len(part)] = part
            number, offset = number + 1, 0


def chain(state: int, token_ids: Sequence[int]) -> bytes:
    """Return the slots that follow `state` for these tokens."""
    slots = []
    for token in token_ids:
        state = crc32(token.to_bytes(SIZE, "little"), state)
        slots.append(state.to_bytes(SIZE, "little"))
    return b"".join(slots)


def _token(context: int, seed: int, index: int, vocab_size: int) -> int:
    return crc32(b"%d %d %d" % (context, seed, index)) % vocab_size


def expected(prompt: Sequence[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """Return the tokens that any correct engine generates for a prompt."""
    slots = chain(EMPTY, prompt)
    context, state = crc32(slots), int.from_bytes(slots[-SIZE:], "little")
    tokens: list[int] = []
    for index in range(count):
        token = _token(context, seed, index, vocab_size)
        tokens.append(token)
        state = crc32(token.to_bytes(SIZE, "little"), state)
        context = crc32(state.to_bytes(SIZE, "little"), context)
    return tokens
