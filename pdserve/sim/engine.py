"""An engine whose KV is a chain of hashes, and whose tokens are hashes of all of it: wrong KV is a wrong token."""

from collections.abc import Sequence
from zlib import crc32

from pdserve.engine.step import Chunk, SampledToken, SampleSpec, StepPlan, StepResult
from pdserve.errors import InvariantError
from pdserve.ids import PageId

EMPTY = 0  # what stands before the first token
SIZE = 4  # bytes of a slot


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
        return StepResult(tuple([self._compute(chunk) for chunk in plan.chunks]), 0.0)

    def _compute(self, chunk: Chunk) -> tuple[SampledToken, ...]:
        if len(chunk.pages) * self._page_size < chunk.start + len(chunk.token_ids):
            raise InvariantError("a chunk reaches beyond its pages")
        memory, size, begin = self.memory, self.page_bytes, chunk.start * SIZE
        before = b"".join([memory[page * size : (page + 1) * size] for page in chunk.pages])[:begin]
        state = int.from_bytes(before[-SIZE:], "little") if before else EMPTY
        fresh = b"".join([state.to_bytes(SIZE, "little") for state in chain(state, chunk.token_ids)])
        for done in range(0, len(fresh), SIZE):
            slot, rest = divmod(begin + done, size)
            offset = chunk.pages[slot] * size + rest
            memory[offset : offset + SIZE] = fresh[done : done + SIZE]
        if not chunk.samples:
            return ()
        context = crc32(fresh, crc32(before))
        return tuple([SampledToken(_draw(context, spec, self._vocab_size)) for spec in chunk.samples])


def chain(state: int, token_ids: Sequence[int]) -> list[int]:
    """Return the slots that follow `state` for these tokens."""
    slots = []
    for token in token_ids:
        state = crc32(token.to_bytes(4, "little"), state)
        slots.append(state)
    return slots


def _draw(context: int, spec: SampleSpec, vocab_size: int) -> int:
    return _token(context, spec.seed, spec.index, vocab_size)


def _token(context: int, seed: int, index: int, vocab_size: int) -> int:
    return crc32(b"%d %d %d" % (context, seed, index)) % vocab_size


def expected(prompt: Sequence[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """Return the tokens that any correct engine generates for a prompt."""
    slots = chain(EMPTY, prompt)
    context = crc32(b"".join([slot.to_bytes(SIZE, "little") for slot in slots]))
    state = slots[-1]
    tokens: list[int] = []
    for index in range(count):
        token = _token(context, seed, index, vocab_size)
        tokens.append(token)
        state = crc32(token.to_bytes(4, "little"), state)
        context = crc32(state.to_bytes(SIZE, "little"), context)
    return tokens
