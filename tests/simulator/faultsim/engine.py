"""An engine whose KV is a chain of hashes, and whose tokens are hashes of all of it: wrong KV is a wrong token.

Each group of layers after the first has the same chain, told apart by the group's number. A token depends on what a
query sees of it: with a window, on its last tokens. With an adapter, the chain begins elsewhere.

A group of states has the end of the chain alone, in the page of its span, and goes on from what the page before holds.
"""

from collections.abc import Callable, Sequence
from struct import Struct, pack, unpack
from zlib import crc32

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.step import Chunk, StepPlan, StepResult, Tokens
from pdserve.protocol.adapters import NO_ADAPTER, AdapterDigest
from pdserve.protocol.paging import PageShape, Paging
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.sampling import SampledToken

SLOT = Struct("<I")
SIZE = SLOT.size  # bytes of a slot
_slot = SLOT.pack


class FakeRunner:
    """Computes steps on bytes: the slot of a token holds a hash of that token and the slot before it.

    With `most_drafts` it guesses what follows, up to so many tokens: some guesses are right, others are not. With
    `others` it has more groups of layers than one; the pages of the first are the largest. `before_states` may raise
    when all of a step is written but its states, as an engine fails.
    """

    def __init__(
        self, num_pages: int, page_size: int, vocab_size: int, most_drafts: int = 0, others: Sequence[PageShape] = ()
    ) -> None:
        self._most_drafts = most_drafts
        self.page_bytes = page_size * SIZE
        self.paging = Paging((PageShape(page_size), *others))
        self._others = tuple(others)
        self._pages = [bytearray(self.page_bytes) for _ in range(num_pages)]
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._states: dict[PageId, bytes] = {}  # of the step that runs
        self._behind: dict[tuple[int, int], int] = {}  # of each group and length, the state behind a chunk's tokens
        self.before_states: Callable[[StepPlan], None] = lambda _: None

    def page(self, page: PageId) -> bytearray:
        """Return one page's bytes, to be changed in place."""
        return self._pages[page]

    def run(self, plan: StepPlan) -> StepResult:
        self._states = {}
        for source, target in plan.copies:
            self._pages[target][:] = self._pages[source]
        tokens = tuple([self._compute(chunk) for chunk in plan.chunks])
        self._behind = {}
        pooled = {place: self._pool(chunk) for place, chunk in enumerate(plan.chunks) if chunk.pooling is not None}
        self.before_states(plan)
        for page, content in self._states.items():
            self._pages[page][:] = content
        if not self._most_drafts:
            return StepResult(tokens, 0.0, pooled=pooled)
        sampled = enumerate(zip(plan.chunks, tokens, strict=True))
        drafts = {place: self._guess(chunk, kept[0]) for place, (chunk, kept) in sampled if len(kept) == 1}
        return StepResult(tokens, 0.0, drafts=drafts, pooled=pooled)

    def _compute(self, chunk: Chunk) -> tuple[Tokens, ...]:
        memory, begin = self._pages, chunk.start * SIZE
        pages = [memory[page] for page in chunk.pages]
        before = b"".join(pages)[:begin]
        state = int.from_bytes(before[-SIZE:], "little") if before else beginning(chunk.adapter)
        fresh = chain(state, chunk.token_ids)
        if len(pages) * self.page_bytes < begin + len(fresh):
            raise InvariantError("a chunk reaches beyond its pages")
        self._write(pages, begin, fresh)
        self._behind = {}
        if self._others:
            self._write_others(chunk, fresh)
        tokens = self._sample(chunk, before, fresh)
        num_right = len(tokens[0]) - 1 if chunk.num_drafts else 0
        self._keep_states(chunk, chunk.start + len(chunk.token_ids) - chunk.num_drafts + num_right)
        return tokens

    def _sample(self, chunk: Chunk, before: bytes, fresh: bytes) -> tuple[Tokens, ...]:
        samples, begin = chunk.samples, chunk.start * SIZE
        if not samples:
            return ()
        first = len(fresh) - chunk.num_drafts * SIZE
        context, vocab_size = crc32(fresh[:first], crc32(before)), self._vocab_size
        if chunk.num_drafts:
            return (self._verify(chunk, context, fresh[first:]),)
        if self._others:
            context = mixed(context, self._read_others(chunk, (begin + first) // SIZE))
        if len(samples) == 1:
            return ((SampledToken(_token(context, samples[0].seed, samples[0].index, vocab_size)),),)
        return tuple([(SampledToken(_token(context, spec.seed, spec.index, vocab_size)),) for spec in samples])

    def _pool(self, chunk: Chunk) -> bytes:
        """Return a vector of one number: of all slots up to the chunk's end, or the sum of its own."""
        end = chunk.start + len(chunk.token_ids)
        slots = b"".join([self._pages[page] for page in chunk.pages])[: end * SIZE]
        if chunk.pooling is not None and chunk.pooling.reads_all:
            return vector_of_sum(slots[chunk.start * SIZE :])
        return vector_of(mixed(crc32(slots), self._read_others(chunk, end)))

    def _verify(self, chunk: Chunk, context: int, guessed: bytes) -> Tokens:
        """Return what is sampled at the last known token and behind each guess that is what was sampled before it."""
        (spec,), kept = chunk.samples, list[SampledToken]()
        num_known = chunk.start + len(chunk.token_ids) - chunk.num_drafts
        for number, guess in enumerate((*chunk.token_ids[-chunk.num_drafts :], None)):
            seen = mixed(context, self._read_others(chunk, num_known + number)) if self._others else context
            token = _token(seen, spec.seed, spec.index + number, self._vocab_size)
            kept.append(SampledToken(token))
            if token != guess:
                break
            context = crc32(guessed[number * SIZE : (number + 1) * SIZE], context)
        return tuple(kept)

    def _guess(self, chunk: Chunk, kept: Tokens) -> tuple[int, ...]:
        """Return what will follow, as far as that goes before a guess that is wrong; now and then nothing."""
        (spec,), size, num_right = chunk.samples, self._vocab_size, len(kept) - 1
        end = chunk.start + len(chunk.token_ids) - chunk.num_drafts + num_right
        slots = b"".join([self._pages[page] for page in chunk.pages])[: end * SIZE]
        context, state = crc32(slots), int.from_bytes(slots[-SIZE:], "little")
        guesses: list[int] = []
        others = self._read_others(chunk, end)
        for number, token in enumerate((kept[-1], *[None] * self._most_drafts), num_right):
            seen = mixed(context, others) if others else context
            real = _token(seen, spec.seed, spec.index + number, size) if token is None else token.token_id
            if token is None:
                is_right = crc32(b"%d" % context) % 4 > 0
                guesses.append(real if is_right else (real + 1) % size)
            state = crc32(_slot(real), state)
            context = crc32(_slot(state), context)
            others = [cut([*slots, state], shape) for slots, shape in zip(others, self._others, strict=True)]
        return tuple(guesses[: crc32(b"%d %d" % (context, spec.index)) % (self._most_drafts + 1)])

    def _write(self, pages: Sequence[bytearray], begin: int, fresh: bytes) -> None:
        page_bytes = self.page_bytes
        number, offset = begin // page_bytes, begin % page_bytes
        while offset + len(fresh) > page_bytes:
            part, fresh = fresh[: page_bytes - offset], fresh[page_bytes - offset :]
            pages[number][offset:] = part
            number, offset = number + 1, 0
        pages[number][offset : offset + len(fresh)] = fresh

    def _write_others(self, chunk: Chunk, fresh: bytes) -> None:
        states = [int.from_bytes(fresh[place : place + SIZE], "little") for place in range(0, len(fresh), SIZE)]
        for group, (shape, rows) in enumerate(zip(self._others, chunk.other_pages, strict=True), 1):
            if shape.is_state:
                self._write_states(group, shape, rows, chunk)
                continue
            width = self.page_bytes // shape.page_size
            for position, state in enumerate(states, chunk.start):
                number, slot = divmod(position, shape.page_size)
                self._pages[rows[number]][slot * width : (slot + 1) * width] = group_slot(group, state, width)

    def _write_states(self, group: int, shape: PageShape, rows: Sequence[PageId], chunk: Chunk) -> None:
        """Go on from the state before a chunk."""
        state = self._state_after(group, shape, rows, chunk.start) if chunk.start else beginning(chunk.adapter)
        slots = chain(state, chunk.token_ids)
        for place in range(len(chunk.token_ids)):
            behind = int.from_bytes(slots[place * SIZE : (place + 1) * SIZE], "little")
            self._behind[group, chunk.start + place + 1] = behind

    def _keep_states(self, chunk: Chunk, num_final: int) -> None:
        """Leave states at the ends of spans, and behind the last final token, which may be a right guess."""
        for (group, num_tokens), state in self._behind.items():
            size = self._others[group - 1].page_size
            if num_tokens == num_final or (num_tokens < num_final and num_tokens % size == 0):
                page = chunk.other_pages[group - 1][(num_tokens - 1) // size]
                self._states[page] = group_slot(group, state, self.page_bytes)

    def _state_after(self, group: int, shape: PageShape, rows: Sequence[PageId], num_tokens: int) -> int:
        if (group, num_tokens) in self._behind:
            return self._behind[group, num_tokens]
        page = rows[(num_tokens - 1) // shape.page_size]
        return _state(group, self._states.get(page) or bytes(self._pages[page]))

    def _read_others(self, chunk: Chunk, num_tokens: int) -> list[list[int]]:
        """Return what a query at the last of so many tokens sees in each group after the first."""
        seen: list[list[int]] = []
        for group, (shape, rows) in enumerate(zip(self._others, chunk.other_pages, strict=True), 1):
            if shape.is_state:
                seen.append([self._state_after(group, shape, rows, num_tokens)])
                continue
            width, first = self.page_bytes // shape.page_size, max(0, num_tokens - (shape.window or num_tokens))
            places = [divmod(position, shape.page_size) for position in range(first, num_tokens)]
            slots = [bytes(self._pages[rows[number]][slot * width : (slot + 1) * width]) for number, slot in places]
            seen.append([_state(group, slot) for slot in slots])
        return seen

    def _seen(self, context: int, others: Sequence[Sequence[int]]) -> int:
        return mixed(context, others)


def group_slot(group: int, state: int, width: int) -> bytes:
    """Return what a group after the first has in the slot of a token."""
    return _slot(state ^ group) * (width // SIZE)


def _state(group: int, slot: bytes) -> int:
    """Return the state that a slot holds, or something else if it is not whole."""
    state = int.from_bytes(slot[:SIZE], "little") ^ group
    return state if slot == group_slot(group, state, len(slot)) else crc32(slot)


def vector_of(number: int) -> bytes:
    """Return a vector that holds a number as float32 can."""
    return pack("<f", number % 2**20)


def vector_of_sum(slots: bytes) -> bytes:
    return vector_of(sum(SLOT.unpack(slots[place : place + SIZE])[0] % 2**12 for place in range(0, len(slots), SIZE)))


def expected_vector(
    prompt: Sequence[int], pooling: Pooling, others: Sequence[PageShape] = (), adapter: AdapterDigest = NO_ADAPTER
) -> bytes:
    """Return the vector that any correct engine makes of a prompt."""
    slots = chain(beginning(adapter), prompt)
    if pooling.reads_all:
        (total,) = unpack("<f", vector_of_sum(slots))
        return pack("<f", total / len(prompt))
    states = [int.from_bytes(slots[place : place + SIZE], "little") for place in range(0, len(slots), SIZE)]
    return vector_of(mixed(crc32(slots), [cut(states, shape) for shape in others]))


def cut(states: list[int], shape: PageShape) -> list[int]:
    """Return which of the last states a query sees."""
    if shape.is_state:
        return states[-1:]
    return states if shape.window is None else states[-shape.window :]


def mixed(context: int, others: Sequence[Sequence[int]]) -> int:
    """Return the context with what is seen in the groups after the first."""
    for states in others:
        context = crc32(b"".join(map(_slot, states)), context)
    return context


def beginning(adapter: AdapterDigest) -> int:
    """Return what stands before the first token."""
    return crc32(adapter)


def chain(state: int, token_ids: Sequence[int]) -> bytes:
    """Return the slots that follow `state` for these tokens."""
    slots = []
    for token in token_ids:
        state = crc32(_slot(token), state)
        slots.append(_slot(state))
    return b"".join(slots)


def _token(context: int, seed: int, index: int, vocab_size: int) -> int:
    return crc32(b"%d %d %d" % (context, seed, index)) % vocab_size


def expected(
    prompt: Sequence[int],
    seed: int,
    count: int,
    vocab_size: int,
    others: Sequence[PageShape] = (),
    adapter: AdapterDigest = NO_ADAPTER,
) -> list[int]:
    """Return the tokens that any correct engine generates for a prompt."""
    slots = chain(beginning(adapter), prompt)
    states = [int.from_bytes(slots[place : place + SIZE], "little") for place in range(0, len(slots), SIZE)]
    context, tokens = crc32(slots), list[int]()
    for index in range(count):
        token = _token(mixed(context, [cut(states, shape) for shape in others]), seed, index, vocab_size)
        tokens.append(token)
        states.append(crc32(_slot(token), states[-1]))
        context = crc32(_slot(states[-1]), context)
    return tokens
