"""Recurrences over states in pages on a GPU: short convolutions, gated delta nets, Mamba-2, for layers with a state.

What a token becomes, and the state behind it, depend on its sequence alone. No page is written before `keep`: till
then, memory beside the pages has how each token changes the memories of heads, and the last inputs of convolutions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.attention_plan import Ints
from pdserve.kernels.checks import require, require_lens, require_page_table, require_tensor
from pdserve.kernels.cpu.states import Heads, Recurrence
from pdserve.kernels.device import states as device_states
from pdserve.kernels.pageio import power_of_two
from pdserve.kernels.staging import Staging, aligned

DTYPES = (torch.bfloat16, torch.float32)  # of inputs and results
CONVOLVED = 256  # channels of a program
MEMORY = 2048  # values of a head's memory that a program has in registers
MAX_KEY_DIM = MEMORY
TOKEN_FIELDS = 3
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

    @property
    def max_pieces(self) -> int:
        """Return how many states a step leaves at most: behind each sequence's tokens, and at the ends of pages."""
        return min(self.max_tokens, 2 * self.max_seqs + self.max_tokens // self.span)

    @property
    def kept_bytes(self) -> int:
        """Return what the largest step keeps beside the pages."""
        each = self.max_tokens * self.changes + self.max_pieces * self.kept_inputs
        return FLOAT_BYTES * self.num_layers * each


@dataclass(frozen=True, slots=True)
class _Plan:
    tokens: Tensor  # int32 [at least num_tokens, TOKEN_FIELDS]: see `kernels/device/states.py`
    starts: Tensor  # int32 [at least num_chunks + 1]
    pages: Tensor  # int32 [num_pieces]: where the states behind pieces belong
    num_chunks: int
    num_tokens: int


class PagedStates:
    """Recurrences of all layers over one pool of pages.

    Nothing moves between two steps of single tokens: `recur` may be captured, for up to `max_seqs` rows, and `plan`
    then changes what replays compute. Rows behind the planned ones are computed as first tokens, which nobody keeps.
    """

    def __init__(self, pool: Tensor, spec: StatesSpec) -> None:
        """pool: float32 [num_pages, values of a page], contiguous."""
        require_tensor("pool", pool, (None, None), (torch.float32,))
        require(pool.is_contiguous(), "pool must be contiguous")
        layer = spec.kept_inputs + spec.memory
        require(spec.num_layers * layer <= pool.shape[1], f"pool has no room for {spec.num_layers} states of {layer}")
        self._pool, self._spec = pool, spec
        self._by_layer = pool[:, : spec.num_layers * layer].view(len(pool), spec.num_layers, layer)
        self._changes = pool.new_zeros((spec.num_layers, spec.max_tokens, spec.changes))
        self._inputs = pool.new_zeros((spec.max_pieces, spec.num_layers, spec.kept_inputs))
        most = TOKEN_FIELDS * spec.max_tokens, spec.max_tokens + 1, spec.max_pieces
        self._staging = Staging(pool.device, sum(map(aligned, most)))
        self._heads: Heads | None = None  # of every layer, once one was computed
        self._plan: _Plan | None = None

    def plan(self, page_table: Ints, query_lens: Ints, kv_lens: Ints) -> None:
        """Prepare what the layers of a step share: its chunks, and their pages in order."""
        spec, span = self._spec, self._spec.span
        require_lens(query_lens, kv_lens)
        require_page_table(page_table, kv_lens, span)
        num_tokens, num_chunks = int(query_lens.sum()), len(query_lens)
        require(num_tokens <= spec.max_tokens, f"query_lens: {num_tokens} tokens, {spec.max_tokens} at most")
        positions = kv_lens - query_lens
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(query_lens)))
        chunks = np.repeat(np.arange(num_chunks), query_lens)
        places = np.arange(num_tokens) - starts[chunks]
        found = np.take_along_axis(page_table, np.maximum(positions - 1, 0)[:, None] // span, 1)[:, 0]
        at = positions[chunks] + places
        ends = (at + 1 == kv_lens[chunks]) | ((at + 1) % span == 0)
        pages = page_table[chunks[ends], at[ends] // span]
        require(len(pages) <= spec.max_pieces, f"query_lens: {len(pages)} pieces, {spec.max_pieces} at most")
        tokens = np.zeros((max(num_tokens, spec.max_seqs), TOKEN_FIELDS), dtype=np.int64)
        tokens[:, 1:] = -1
        pieces = np.where(ends, np.cumsum(ends) - 1, -1)
        tokens[:num_tokens] = np.stack((places, np.where(positions > 0, found, -1)[chunks], pieces), axis=1)
        padding = np.arange(num_tokens + 1, len(tokens) + 1)  # chunks of a token each
        sent = self._staging.send(tokens, np.concatenate((starts, padding)), pages)
        self._plan = _Plan(sent[0], sent[1], sent[2], num_chunks, num_tokens)

    def recur(self, of: Recurrence, place: int, taken: Tensor) -> Tensor:
        """Return what a layer makes of its inputs: [num_tokens, `of.width`].

        place: of the layer among those with a state. taken: [num_tokens, features].
        """
        plan = self._planned()
        num_tokens, is_single = len(taken), plan.num_chunks == plan.num_tokens
        room = len(plan.tokens) if is_single else plan.num_tokens
        require_tensor("taken", taken, (None, None), DTYPES)
        fits = plan.num_tokens <= num_tokens <= room
        require(fits, f"taken must be of {plan.num_tokens} to {room} tokens, got {num_tokens}")
        require(of.kept_inputs == self._spec.kept_inputs and of.memory == self._spec.memory, "layers must be alike")
        (kernel, channels), heads, pool, inputs = of.weight.shape, of.heads, self._pool, self._inputs[:, place]
        first = place * self._by_layer.shape[2]
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
        block_k, block_v, num_blocks = _blocks(heads)
        keys, at = heads.groups * heads.key_dim, {}
        for name in heads.order:
            at[name] = sum([of.width if each == "v" else keys for each in heads.order[: heads.order.index(name)]])
        device_states.recur[num_tokens if is_single else plan.num_chunks, heads.count, num_blocks](
            convolved, taken, made, self._changes[place], pool, heads.rate, heads.rate_bias,
            heads.rate if heads.direct is None else heads.direct, plan.tokens, plan.starts,
            taken.stride(0), pool.shape[1], first + of.kept_inputs, at["q"], at["k"], at["v"],
            heads.rates_at, heads.betas_at or 0,
            CHANNELS=channels, HEADS=heads.count, GROUPS=heads.groups, KEY_DIM=heads.key_dim,
            VALUE_DIM=heads.value_dim, BLOCK_K=block_k, BLOCK_V=block_v, CORRECTS=heads.betas_at is not None,
            HAS_DIRECT=heads.direct is not None, num_warps=4,
        )  # fmt: skip
        return _gated(of, heads, made, taken)

    def keep(self) -> None:
        """Write the states behind the planned tokens, which all layers have computed, into their pages."""
        plan, spec, heads = self._planned(), self._spec, self._heads
        pages = plan.pages.long()  # before the first launch: what fails between the two would count tokens twice
        if heads is not None:
            block_k, block_v, num_blocks = _blocks(heads)
            device_states.keep[plan.num_chunks, spec.num_layers * heads.count, num_blocks](
                self._changes, self._pool, plan.tokens, plan.starts, plan.pages, self._changes.stride(0),
                self._pool.shape[1], self._by_layer.shape[2], spec.kept_inputs,
                HEADS=heads.count, GROUPS=heads.groups, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
                BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
            )  # fmt: skip
        kept = self._by_layer[:, :, : spec.kept_inputs]
        kept.index_copy_(0, pages, self._inputs[: len(plan.pages)])

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


def _blocks(heads: Heads) -> tuple[int, int, int]:
    """Return the keys and the columns of a program's part of a memory, and into how many parts a head's is divided."""
    require(heads.key_dim <= MAX_KEY_DIM, f"key_dim must be at most {MAX_KEY_DIM}, got {heads.key_dim}")
    block_k = power_of_two(heads.key_dim)
    block_v = min(power_of_two(heads.value_dim), max(1, MEMORY // block_k))
    return block_k, block_v, -(-heads.value_dim // block_v)
