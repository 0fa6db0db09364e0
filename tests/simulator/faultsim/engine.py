"""An engine whose KV is a chain of hashes, and whose tokens are hashes of all of it: wrong KV is a wrong token."""

from collections.abc import Sequence
from struct import Struct
from zlib import crc32

from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.ids import PageId
from pdserve.sampling import SampledToken

EMPTY = 0  # what stands before the first token
SLOT = Struct("<I")
SIZE = SLOT.size  # bytes of a slot
_slot = SLOT.pack


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
        memory, samples, begin = self._pages, chunk.samples, chunk.start * SIZE
        pages = [memory[page] for page in chunk.pages]
        before = b"".join(pages)[:begin]
        state = int.from_bytes(before[-SIZE:], "little") if before else EMPTY
        fresh = chain(state, chunk.token_ids)
        if len(pages) * self.page_bytes < begin + len(fresh):
            raise InvariantError("a chunk reaches beyond its pages")
        self._write(pages, begin, fresh)
        if not samples:
            return ()
        context, vocab_size = crc32(fresh, crc32(before)), self._vocab_size
        if len(samples) == 1:
            return (SampledToken(_token(context, samples[0].seed, samples[0].index, vocab_size)),)
        return tuple([SampledToken(_token(context, spec.seed, spec.index, vocab_size)) for spec in samples])

    def _write(self, pages: Sequence[bytearray], begin: int, fresh: bytes) -> None:
        page_bytes = self.page_bytes
        number, offset = begin // page_bytes, begin % page_bytes
        while offset + len(fresh) > page_bytes:
            part, fresh = fresh[: page_bytes - offset], fresh[page_bytes - offset :]
            pages[number][offset:] = part
            number, offset = number + 1, 0
        pages[number][offset : offset + len(fresh)] = fresh


def chain(state: int, token_ids: Sequence[int]) -> bytes:
    """Return the slots that follow `state` for these tokens."""
    slots = []
    for token in token_ids:
        state = crc32(_slot(token), state)
        slots.append(_slot(state))
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
        state = crc32(_slot(token), state)
        context = crc32(_slot(state), context)
    return tokens
