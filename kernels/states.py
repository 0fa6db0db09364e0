"""Recurrences over states in pages on a GPU: short convolutions, gated delta nets, Mamba-2, for layers with a state.

Heads compute long chunks of a prompt in blocks of tokens, and other chunks token by token. What a token becomes, and
the state behind it, depend on its sequence alone; rounding, on how that is cut into chunks, too. No page is written
before `keep`: till then, memory beside the pages has how each token changes the memories of heads, and the last inputs
of convolutions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.attention_plan import Ints
from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.states import Heads, Recurrence
from pdserve.kernels.device import state_blocks
from pdserve.kernels.device import states as device_states
from pdserve.kernels.pageio import power_of_two
from pdserve.kernels.staging import Staging, aligned
from pdserve.kernels.state_pieces import Bools, Pieces

DTYPES = (torch.bfloat16, torch.float32)  # of inputs and results
CONVOLVED = 256  # channels of a program
MEMORY = 2048  # values of a head's memory that a program has in registers
MAX_KEY_DIM = MEMORY
TOKEN_FIELDS = 3
BLOCK = 64  # tokens that are computed at once
MULTIPLIED_KEYS = 32  # features of keys that are multiplied with each other at once: more spill on Hopper
BLOCKED_KEYS = 64  # rows of a memory that are multiplied at once
BLOCKED_MEMORY = 4096  # values of a head's memory that a program passes from block to block
MAX_BLOCKED_KEY_DIM = 256
LEAST_OF_PRODUCTS = 16  # rows and columns of matrices that are multiplied
# Tokens of the shortest chunk that is computed in blocks. A block that is not full takes as long as a full one, and
# blocks take a launch more, so short chunks gain little or lose. An assumption: no GPU has measured it.
MIN_BLOCKED = BLOCK
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StatesSpec:
    """States of layers that are alike, as far as they do not change between steps, and the largest step."""

    num_layers: int
    kept_inputs: int  # values of a layer's state: first the last inputs of its convolution,
    memory: int  # then the memories of its heads
    changes: int  # values by which a token changes these
    span: int  # tokens of a page
    max_tokens: int
    max_seqs: int  # no more than these
    products: int = 0  # of each token with those of its block; 0: there are no blocks
    min_blocked: int = MIN_BLOCKED
    num_slabs: int = 1  # of a page, of one length: each has a part of every layer's state

    @property
    def num_places(self) -> int:
        """Return in how many places a page has a part of a layer's state."""
        return self.num_slabs * self.num_layers

    @property
    def max_blocks(self) -> int:
        """Return into how many blocks a step's tokens are divided at most: they end where pieces end, and when full."""
        return min(self.max_tokens, self.max_pieces + self.max_tokens // BLOCK)

    @property
    def max_pieces(self) -> int:
        """Return how many states a step leaves at most: behind each sequence's tokens, and at the ends of pages."""
        return min(self.max_tokens, 2 * self.max_seqs + self.max_tokens // self.span)

    @property
    def kept_bytes(self) -> int:
        """Return what the largest step keeps beside the pages."""
        each = self.max_tokens * self.changes + self.max_pieces * self.kept_inputs
        return FLOAT_BYTES * (self.num_places * each + self.max_tokens * self.products * BLOCK)


@dataclass(frozen=True, slots=True)
class _Plan:
    of: Pieces
    tokens: Tensor  # int32 [at least num_tokens, TOKEN_FIELDS]: see `kernels/device/states.py`
    short: Tensor  # int32 [at least num_short, 2]: the first token of a chunk, and the one behind its last; or none
    long: Tensor  # int32 [num_long, 2]: as much of blocks
    blocks: Tensor  # int32 [num_blocks, 2]: as much of tokens
    pages: Tensor  # int32 [num_pieces]: where the states behind pieces belong
    num_short: int
    num_tokens: int
    decodes: bool  # single tokens, and guesses behind them, alone


class PagedStates:
    """Recurrences of all layers over one pool of pages.

    Nothing moves between two steps that decode: `recur` may be captured, for up to `max_seqs` rows, and `plan` then
    changes what replays compute. Rows behind the planned ones are computed as first tokens, which nobody keeps.
    """

    def __init__(self, pool: Tensor, spec: StatesSpec) -> None:
        """pool: float32 [num_pages, values of a page], contiguous."""
        require_tensor("pool", pool, (None, None), (torch.float32,))
        require(pool.is_contiguous(), "pool must be contiguous")
        layer, count = spec.kept_inputs + spec.memory, spec.num_slabs
        slab = pool.shape[1] // count
        require(spec.num_layers * layer <= slab, f"pool has no room for {spec.num_places} states of {layer}")
        self._pool, self._spec, self._slab = pool, spec, slab
        slabs = pool[:, : count * slab].view(len(pool), count, slab)
        self._by_layer = slabs[:, :, : spec.num_layers * layer].unflatten(2, (spec.num_layers, layer))
        self._changes = pool.new_zeros((spec.num_places, spec.max_tokens, spec.changes))
        self._inputs = pool.new_zeros((spec.max_pieces, spec.num_places, spec.kept_inputs))
        self._products = pool.new_zeros((spec.max_tokens, spec.products, BLOCK))  # of a layer at a time
        blocks = 2 * spec.max_blocks
        most = TOKEN_FIELDS * spec.max_tokens, 2 * spec.max_tokens, blocks, blocks, spec.max_pieces
        self._staging, self._later = Staging(pool.device, sum(map(aligned, most))), Staging(pool.device)
        self._heads: Heads | None = None  # of every layer, once one was computed
        self._plan: _Plan | None = None

    def plan(self, page_table: Ints, query_lens: Ints, kv_lens: Ints, has_guesses: Bools | None = None) -> None:
        """Prepare what the layers of a step share: its chunks, and their pages in order."""
        spec = self._spec
        of = Pieces.of(page_table, query_lens, kv_lens, spec.span, has_guesses)
        num_tokens, num_pieces, chunks = len(of.chunks), len(of.pages), of.chunks
        require(num_tokens <= spec.max_tokens, f"query_lens: {num_tokens} tokens, {spec.max_tokens} at most")
        require(num_pieces <= spec.max_pieces, f"query_lens: {num_pieces} pieces, {spec.max_pieces} at most")
        tokens = np.zeros((max(num_tokens, spec.max_seqs), TOKEN_FIELDS), dtype=np.int64)
        tokens[:, 1:] = -1
        tokens[:num_tokens] = np.stack((of.places, of.before[chunks], of.ended), axis=1)
        is_long = (query_lens >= spec.min_blocked) & (spec.products > 0)
        at = np.minimum(of.places, of.positions % spec.span)
        begins = np.flatnonzero(is_long[chunks] & (at % BLOCK == 0))
        counts = np.bincount(chunks[begins], minlength=len(query_lens))[is_long]
        blocks = _ranges(begins, np.minimum(np.append(begins[1:], num_tokens), of.starts[1:][chunks[begins]]))
        short = _ranges(of.starts[:-1][~is_long], of.starts[1:][~is_long])
        num_short = len(short)
        decodes = bool(((query_lens == 1) | (False if has_guesses is None else has_guesses)).all())
        if decodes:  # then padding: chunks without tokens up to the last row, and of a token each behind it
            padding = np.arange(num_tokens, len(tokens))
            empty = np.zeros((num_tokens - num_short, 2), dtype=np.int64)
            short = np.concatenate((short, empty, _ranges(padding, padding + 1)))
        long = _ranges(np.cumsum(counts) - counts, np.cumsum(counts))
        sent = self._staging.send(tokens, short, long, blocks, of.pages)
        self._plan = _Plan(of, sent[0], sent[1], sent[2], sent[3], sent[4], num_short, num_tokens, decodes)

    def recur(self, of: Recurrence, place: int, taken: Tensor) -> Tensor:
        """Return what a layer makes of its inputs: [num_tokens, `of.width`].

        place: of the layer among those with a state, behind those of the slabs before its own.
        taken: [num_tokens, features].
        """
        plan, num_tokens = self._planned(), len(taken)
        room = len(plan.tokens) if plan.decodes else plan.num_tokens
        require_tensor("taken", taken, (None, None), DTYPES)
        fits = plan.num_tokens <= num_tokens <= room
        require(fits, f"taken must be of {plan.num_tokens} to {room} tokens, got {num_tokens}")
        require(of.kept_inputs == self._spec.kept_inputs and of.memory == self._spec.memory, "layers must be alike")
        (kernel, channels), heads, pool, inputs = of.weight.shape, of.heads, self._pool, self._inputs[:, place]
        first = self._first(place)
        convolved = taken.new_empty((num_tokens, channels), dtype=taken.dtype if heads is None else torch.float32)
        device_states.convolve[num_tokens, -(-channels // CONVOLVED)](
            taken, convolved, inputs, pool, of.weight, of.weight if of.bias is None else of.bias, plan.tokens,
            taken.stride(0), inputs.stride(0), pool.shape[1], first, of.inputs_at, of.before_at, of.gates_at,
            CHANNELS=channels, KERNEL=kernel, BLOCK=CONVOLVED, HAS_HEADS=heads is not None,
            HAS_BIAS=of.bias is not None, num_warps=4,
        )  # fmt: skip
        if heads is None:
            return convolved
        self._heads = heads
        made = taken.new_empty((num_tokens, of.width), dtype=torch.float32)
        if plan.num_short:
            self._recur_short(heads, place, taken, convolved, made)
        if len(plan.long):
            self._recur_long(heads, place, taken, convolved, made)
        return _gated(of, heads, made, taken)

    def _recur_short(self, heads: Heads, place: int, taken: Tensor, convolved: Tensor, made: Tensor) -> None:
        plan, at = self._planned(), heads.places
        block_k, block_v, num_blocks = _parts(heads, MEMORY)
        device_states.recur[len(taken) if plan.decodes else plan.num_short, heads.count, num_blocks](
            convolved, taken, made, self._changes[place], self._pool, heads.rate, heads.rate_bias,
            heads.rate if heads.direct is None else heads.direct, plan.tokens, plan.short,
            taken.stride(0), self._pool.shape[1], self._memory_at(place), at["q"], at["k"], at["v"],
            heads.rates_at, heads.betas_at or 0,
            CHANNELS=convolved.shape[1], **_sizes(heads), BLOCK_K=block_k, BLOCK_V=block_v,
            CORRECTS=heads.betas_at is not None, HAS_DIRECT=heads.direct is not None, num_warps=4,
        )  # fmt: skip

    def _recur_long(self, heads: Heads, place: int, taken: Tensor, convolved: Tensor, made: Tensor) -> None:
        plan, at, corrects = self._planned(), heads.places, heads.betas_at is not None
        require(self._spec.products == heads.count * (1 + corrects), "products must be of all heads")
        block_k, block_v, num_blocks = _parts(heads, BLOCKED_MEMORY, least=LEAST_OF_PRODUCTS)
        keys = min(block_k, BLOCKED_KEYS)
        changes, products = self._changes[place], self._products
        state_blocks.within_blocks[len(plan.blocks), heads.count](
            convolved, taken, changes, products, heads.rate, heads.rate_bias, plan.blocks,
            taken.stride(0), at["q"], at["k"], heads.rates_at, heads.betas_at or 0,
            CHANNELS=convolved.shape[1], **_sizes(heads), BLOCK=BLOCK,
            KEYS=min(block_k, MULTIPLIED_KEYS), CORRECTS=corrects, num_warps=4, num_stages=1,
        )  # fmt: skip
        state_blocks.across_blocks[len(plan.long), heads.count, num_blocks](
            convolved, taken, made, changes, products, self._pool, heads.rate_bias,
            heads.rate if heads.direct is None else heads.direct, plan.tokens, plan.long, plan.blocks,
            taken.stride(0), self._pool.shape[1], self._memory_at(place), at["q"], at["v"], heads.rates_at,
            CHANNELS=convolved.shape[1], **_sizes(heads), BLOCK=BLOCK, KEYS=keys, TURNS=block_k // keys,
            BLOCK_V=block_v, CORRECTS=corrects, HAS_DIRECT=heads.direct is not None, num_warps=4, num_stages=1,
        )  # fmt: skip

    def keep(self, num_kept: Ints | None = None) -> None:
        """Write the states behind the planned tokens, which all layers have computed, into their pages.

        num_kept: [num_chunks], how many of a chunk's tokens are final; None: all of them.
        """
        plan, heads = self._planned(), self._heads
        # Before the first launch: what fails between the two would count tokens twice.
        pages, inputs = plan.pages, self._inputs[: len(plan.pages)]
        written = pages.long()
        if num_kept is not None:
            final = plan.of.kept(num_kept)
            pages, pieces, written = self._later.send(final, places := np.flatnonzero(final >= 0), final[places])
            inputs, written = inputs.index_select(0, pieces), written.long()
        if heads is not None and plan.num_short:
            self._keep_short(heads, pages)
        if heads is not None and len(plan.long):
            self._keep_long(heads)
        kept = self._by_layer[:, :, :, : self._spec.kept_inputs]
        kept.index_copy_(0, written, inputs.view(len(inputs), *kept.shape[1:]))

    def _keep_short(self, heads: Heads, pages: Tensor) -> None:
        plan = self._planned()
        block_k, block_v, num_blocks = _parts(heads, MEMORY)
        for first, changes in self._of_slabs():
            device_states.keep[plan.num_short, len(changes) * heads.count, num_blocks](
                changes, self._pool, plan.tokens, plan.short, pages,
                changes.stride(0), self._pool.shape[1], self._by_layer.shape[3], self._memory_at(first),
                **_sizes(heads), BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
            )  # fmt: skip

    def _keep_long(self, heads: Heads) -> None:
        plan = self._planned()
        block_k, block_v, num_blocks = _parts(heads, BLOCKED_MEMORY, least=LEAST_OF_PRODUCTS)
        keys = min(block_k, BLOCKED_KEYS)
        for first, changes in self._of_slabs():
            state_blocks.keep_blocks[len(plan.long), len(changes) * heads.count, num_blocks](
                changes, self._pool, plan.tokens, plan.long, plan.blocks, plan.pages,
                changes.stride(0), self._pool.shape[1], self._by_layer.shape[3], self._memory_at(first),
                **_sizes(heads), BLOCK=BLOCK, KEYS=keys, TURNS=block_k // keys, BLOCK_V=block_v,
                num_warps=4, num_stages=1,
            )  # fmt: skip

    def _of_slabs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first place of each slab, and how tokens change the memories of its layers."""
        count = self._spec.num_layers
        return zip(range(0, self._spec.num_places, count), self._changes.split(count), strict=True)

    def _first(self, place: int) -> int:
        """Return where a part of a layer's state begins in a page."""
        slab, layer = divmod(place, self._spec.num_layers)
        layer_floats: int = self._by_layer.shape[3]
        return slab * self._slab + layer * layer_floats

    def _memory_at(self, place: int) -> int:
        """Return where the memory of a part begins in a page."""
        return self._first(place) + self._spec.kept_inputs

    def _planned(self) -> _Plan:
        if self._plan is None:
            raise ValueError("plan must be called first")
        return self._plan


def _gated(of: Recurrence, heads: Heads, made: Tensor, taken: Tensor) -> Tensor:
    """Return what becomes of what heads read: see `Gating`."""
    gating, norm = heads.gating, heads.gating.norm
    part = heads.value_dim if norm is None else gating.part
    out = taken.new_empty(made.shape)
    block = power_of_two(part)
    device_states.gate[len(made), of.width // part](
        made, taken, out, made if norm is None else norm, taken.stride(0), of.gates_at, gating.eps, gating.scale,
        WIDTH=of.width, PART=part, NORM_WIDTH=1 if norm is None else len(norm), BLOCK=block,
        HAS_NORM=norm is not None, GATES_FIRST=gating.gates_first, ROUNDS=gating.rounds,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return out


def _ranges(begins: Ints, ends: Ints) -> Ints:
    return np.stack((begins, ends), axis=1)


def _sizes(heads: Heads) -> dict[str, int]:
    return {
        "HEADS": heads.count, "GROUPS": heads.groups, "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim,
    }  # fmt: skip


def _parts(heads: Heads, values: int, least: int = 1) -> tuple[int, int, int]:
    """Return the keys and the columns of a program's part of a memory, and into how many parts a head's is divided.

    values: of a part; least: of its keys, and of its columns.
    """
    require(heads.key_dim <= MAX_KEY_DIM, f"key_dim must be at most {MAX_KEY_DIM}, got {heads.key_dim}")
    block_k = max(least, power_of_two(heads.key_dim))
    block_v = max(least, min(power_of_two(heads.value_dim), values // block_k))
    return block_k, block_v, -(-heads.value_dim // block_v)
