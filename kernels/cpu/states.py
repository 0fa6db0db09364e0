"""Compiled recurrences over states in pages: short convolutions, gated delta nets, Mamba-2 (src/states.c).

What a token becomes, and the state behind it, depend on its sequence alone: not on how that is cut into chunks, nor on
what else is in the step. No page is written before the calls of `Kept` are computed.
"""

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.attention_plan import Ints
from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.cpu.calls import Call, Calls, Kind
from pdserve.kernels.cpu.library import DTYPES, Pointer, Size
from pdserve.kernels.state_pieces import Bools, Pieces

MAX_KEY_DIM = 2048  # of which 128 columns lie on a thread's stack
MOST_SHORT = 16  # tokens of a short chunk: src/states.h


class _States(ctypes.Structure):
    """`struct states` of src/states.h."""

    _fields_ = (
        *((name, Pointer) for name in ("pool", "starts", "chunks", "before", "ended", "pages")),
        *((name, Size) for name in ("page_floats", "num_chunks", "num_pieces", "num_short", "short_pieces")),
    )


class _Run(ctypes.Structure):
    """`struct run` of src/states.h."""

    _fields_ = tuple([(name, Size) for name in ("begin", "end", "offset")])


class _Recurrence(ctypes.Structure):
    """`struct recurrence` of src/states.h."""

    held: object  # what it points to and nobody else has
    _fields_ = (
        *((name, Pointer) for name in ("weight", "bias")),
        *((name, Size) for name in ("channels", "kernel", "kept_at", "inputs_at", "gates_at", "before_at")),
        *((name, Size) for name in ("heads", "groups", "key_dim", "value_dim", "memory_at", "q_at", "k_at", "v_at")),
        *((name, Size) for name in ("rates_at", "betas_at", "corrects")),
        *((name, Pointer) for name in ("rate", "rate_bias", "direct", "norm")),
        *((name, Size) for name in ("norm_width", "norm_part", "gates_first", "rounds")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, Size) for name in ("kept_width", "num_runs")),
        ("runs", Pointer),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """What becomes of what heads read: a norm, if there is one, and the silu of gates."""

    norm: Tensor | None = None  # [features of a part], of each part's features, or of all
    part: int = 0  # features that are normalized together
    eps: float = 0.0
    gates_first: bool = False  # gates come before the norm
    rounds: bool = False  # what is normalized, and its product with weights, to the type of inputs
    scale: float = 1.0  # of results, once they are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """A memory [key_dim, value_dim] of each head, which forgets at a rate that each token sets."""

    count: int
    groups: int  # of heads that share q and k
    key_dim: int
    value_dim: int
    order: str  # of q, k and v among the channels
    rates_at: int  # of each head, among inputs
    betas_at: int | None = None  # the delta rule's: it corrects what it recalls; others add
    rate: Tensor  # float32 [count], below 0
    rate_bias: Tensor  # float32 [count]
    direct: Tensor | None = None  # float32 [count]: how much of v goes straight into results
    gating: Gating

    @property
    def places(self) -> dict[str, int]:
        """Return the first channel of q, of k and of v."""
        widths = [self.count * self.value_dim if name == "v" else self.groups * self.key_dim for name in self.order]
        return dict(zip(self.order, accumulate(widths, initial=0), strict=False))


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a layer's state: that of one of several ranks in pages that have it as one rank does, or a slab."""

    channels: int  # of all ranks, or of the slab
    runs: tuple[slice, ...]  # of these, the rank's, in its order
    heads_before: int = 0  # of other ranks
    slab: int = 0  # in which it lies: pages may be divided into slabs, which have a part of each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A layer. Its input is a row of several parts, of which `..._at` are the first features."""

    weight: Tensor  # float32 [kernel, channels], of the convolution; the last is that of the token itself
    bias: Tensor | None = None  # float32 [channels]
    inputs_at: int  # of the convolution
    gates_at: int
    before_at: int = 0  # without heads: what inputs are multiplied with
    heads: Heads | None = None
    part: StatePart | None = None  # None: all of it is one rank's

    @property
    def width(self) -> int:
        """Return the features of a result."""
        return self.weight.shape[1] if self.heads is None else self.heads.count * self.heads.value_dim

    @property
    def kept_inputs(self) -> int:
        """Return the values of a state that the convolution needs; a memory comes behind them."""
        return (len(self.weight) - 1) * self.weight.shape[1]

    @property
    def state_part(self) -> StatePart:
        channels = self.weight.shape[1]
        return self.part or StatePart(channels, (slice(0, channels),))

    @property
    def memory_at(self) -> int:
        """Return where a rank's memory begins in a state, behind the inputs that all ranks keep."""
        part, heads = self.state_part, self.heads
        before = 0 if heads is None else part.heads_before * heads.key_dim * heads.value_dim
        return (len(self.weight) - 1) * part.channels + before

    @property
    def memory(self) -> int:
        return 0 if self.heads is None else self.heads.count * self.heads.key_dim * self.heads.value_dim


@dataclass(frozen=True, slots=True)
class Kept:
    """The states behind a layer's tokens, which `call` puts into their pages."""

    call: Call
    tensors: tuple[object, ...]  # that the call reads


class PagedStates:
    """The library's recurrences over one pool of pages."""

    def __init__(self, pool: Tensor, span: int) -> None:
        """pool: float32 [num_pages, values of a page], contiguous. span: the tokens of a page."""
        require_tensor("pool", pool, (None, None), (torch.float32,))
        require(pool.is_contiguous(), "pool must be contiguous")
        self._pool, self._span = pool, span
        self._states = _States(pool=pool.data_ptr(), page_floats=pool.shape[1])
        self._pieces: Pieces | None = None
        self._arrays: dict[str, Ints] = {}  # what the step points to

    def plan(self, page_table: Ints, query_lens: Ints, kv_lens: Ints, has_guesses: Bools | None = None) -> None:
        """Prepare what the layers of a step share: its chunks, short ones first, and their pages in order."""
        states = self._states
        is_short = query_lens <= MOST_SHORT
        require(bool((np.diff(is_short.astype(np.int64)) <= 0).all()), "query_lens: short chunks must come first")
        pieces = self._pieces = Pieces.of(page_table, query_lens, kv_lens, self._span, has_guesses)
        named = np.concatenate((pieces.pages, pieces.before[pieces.before >= 0]))
        require(named.min() >= 0 and named.max() < len(self._pool), "page_table names pages that are not there")
        arrays = {name: getattr(pieces, name) for name in ("starts", "chunks", "before", "ended", "pages")}
        self._arrays = {name: np.ascontiguousarray(array, dtype=np.int64) for name, array in arrays.items()}
        for name, array in self._arrays.items():
            setattr(states, name, array.ctypes.data)
        states.num_chunks, states.num_pieces = len(query_lens), len(pieces.pages)
        states.num_short = np.count_nonzero(is_short)
        states.short_pieces = np.count_nonzero(pieces.lasts < pieces.starts[states.num_short])

    def drop(self, num_kept: Ints) -> None:
        """Let the calls of `Kept` write the state behind so many tokens of each chunk, and those of full spans."""
        if self._pieces is None:
            raise ValueError("plan must be called first")
        self._arrays["pages"][:] = self._pieces.kept(num_kept)

    def recur(self, calls: Calls, of: Recurrence, first: int, taken: Tensor) -> tuple[Tensor, Kept]:
        """Return what a layer makes of its inputs, [num_tokens, `of.width`], and the states that it leaves.

        first: of the layer's values in a page. taken: [num_tokens, features]. In a program, which is of short chunks, a
        plan may have fewer tokens than when it was recorded.
        """
        states, num_tokens, dtype = self._states, len(taken), taken.dtype
        require_tensor("taken", taken, (None, None), tuple(DTYPES))
        num_planned, num_short = (int(self._arrays["starts"][chunk]) for chunk in (states.num_chunks, states.num_short))
        num_pieces, short_pieces = states.num_pieces, states.short_pieces
        is_short = num_short == num_planned
        fits = num_tokens == num_planned or (is_short and num_tokens > num_planned)
        require(fits, f"taken must be of {num_planned} tokens, got {num_tokens}")
        if is_short:
            num_short = short_pieces = num_pieces = num_tokens
        kernel, channels = of.weight.shape
        layer = _layer(of, first, dtype)
        inputs = calls.empty(num_pieces, (kernel - 1) * channels, torch.float32)
        shared = {"type": DTYPES[dtype], "states": ctypes.addressof(states), "recurrence": ctypes.addressof(layer)}
        by_row = {**shared, "x": taken.data_ptr(), "x_stride": taken.stride(0)}
        out = calls.empty(num_tokens, of.width, dtype)
        result = {"out": out.data_ptr(), "out_stride": out.stride(0)}
        convolving = Call(kind=Kind.CONVOLVING, scratch=inputs.data_ptr(), width=channels, **by_row)
        keeping = Call(kind=Kind.KEEPING, residual=inputs.data_ptr(), **shared)
        if of.heads is None:
            convolving.out, convolving.out_stride = out.data_ptr(), out.stride(0)
            calls.take(num_tokens, convolving)
            return out, Kept(keeping, (layer, of, inputs))
        convolved = calls.empty(num_tokens, channels + 2 * of.heads.count, torch.float32)
        made = calls.empty(num_tokens, of.width, torch.float32)
        memories = calls.empty(num_pieces - short_pieces, of.memory, torch.float32)
        convolving.out, convolving.out_stride = convolved.data_ptr(), convolved.stride(0)
        recurring = Call(
            kind=Kind.RECURRING, x=convolved.data_ptr(), x_stride=convolved.stride(0), out=made.data_ptr(),
            out_stride=made.stride(0), scratch=memories.data_ptr(), inputs=of.heads.key_dim * of.heads.value_dim,
            **shared,
        )  # fmt: skip
        gating = Call(kind=Kind.GATING, residual=made.data_ptr(), residual_stride=made.stride(0), **by_row, **result)
        gating.width = of.width
        calls.take(num_tokens, convolving)
        calls.take(num_tokens, recurring)
        calls.take(num_tokens, gating)
        if num_short < num_tokens:
            convolved = convolved[:num_short].clone()  # rows of prompts are many
        keeping.x, keeping.x_stride, keeping.scratch = convolved.data_ptr(), convolved.stride(0), memories.data_ptr()
        return out, Kept(keeping, (layer, of, inputs, convolved, memories))


def scale(
    calls: Calls, x: Tensor, factor: float | Tensor, out: Tensor | None = None, gates: Tensor | None = None
) -> Tensor:
    """Multiply rows [num_rows, width] with a number, with a factor of each feature, or with the sigmoid of gates.

    out: where the result goes; it may be x, or some columns of a wider matrix.
    """
    require_tensor("x", x, (None, None), tuple(DTYPES))
    out = calls.empty(len(x), x.shape[1], x.dtype) if out is None else out
    call = Call(
        kind=Kind.SCALING, type=DTYPES[x.dtype], x=x.data_ptr(), x_stride=x.stride(0), out=out.data_ptr(),
        out_stride=out.stride(0), width=x.shape[1], scale=1.0 if isinstance(factor, Tensor) else factor,
    )  # fmt: skip
    require_tensor("out", out, tuple(x.shape), (x.dtype,))
    if isinstance(factor, Tensor):
        require_tensor("factor", factor, (x.shape[1],), (x.dtype,))
        call.weights = factor.data_ptr()
    if gates is not None:
        require_tensor("gates", gates, tuple(x.shape), (x.dtype,))
        call.residual, call.residual_stride = gates.data_ptr(), gates.stride(0)
    calls.take(len(x), call)
    return out


def multiply_rows(calls: Calls, x: Tensor, factors: Tensor) -> Tensor:
    """Multiply rows [num_rows, width] with as many factors, in place. factors: may be columns of a wider matrix."""
    require_tensor("x", x, (None, None), tuple(DTYPES))
    require_tensor("factors", factors, tuple(x.shape), (x.dtype,))
    call = Call(
        kind=Kind.MULTIPLYING, type=DTYPES[x.dtype], x=x.data_ptr(), x_stride=x.stride(0), out=x.data_ptr(),
        out_stride=x.stride(0), width=x.shape[1], residual=factors.data_ptr(), residual_stride=factors.stride(0),
    )  # fmt: skip
    calls.take(len(x), call)
    return x


def _layer(of: Recurrence, first: int, dtype: torch.dtype) -> _Recurrence:
    """Return a layer as the library sees it; it must live as long as its calls, and so must `of`."""
    kernel, channels = of.weight.shape
    require_tensor("weight", of.weight, (None, None), (torch.float32,))
    layer = _Recurrence(
        weight=of.weight.data_ptr(), channels=channels, kernel=kernel, kept_at=first, inputs_at=of.inputs_at,
        gates_at=of.gates_at, before_at=of.before_at, memory_at=first + of.memory_at,
    )  # fmt: skip
    _set_runs(layer, of.state_part)
    if of.bias is not None:
        require_tensor("bias", of.bias, (channels,), (torch.float32,))
        layer.bias = of.bias.data_ptr()
    heads = of.heads
    if heads is None:
        return layer
    require(heads.count % heads.groups == 0, f"heads must be a multiple of {heads.groups}, got {heads.count}")
    require(heads.key_dim <= MAX_KEY_DIM, f"key_dim must be at most {MAX_KEY_DIM}, got {heads.key_dim}")
    layer.heads, layer.groups, layer.key_dim, layer.value_dim = (
        heads.count,
        heads.groups,
        heads.key_dim,
        heads.value_dim,
    )
    for name, at in heads.places.items():
        setattr(layer, f"{name}_at", at)
    count = of.width + 2 * heads.groups * heads.key_dim
    require(count == channels, f"channels must be {count} of q, k and v, got {channels}")
    layer.rates_at, layer.corrects = heads.rates_at, heads.betas_at is not None
    layer.betas_at = heads.betas_at or 0
    for name, each in (("rate", heads.rate), ("rate_bias", heads.rate_bias), ("direct", heads.direct)):
        if each is not None:
            require_tensor(name, each, (heads.count,), (torch.float32,))
            setattr(layer, name, each.data_ptr())
    gating = heads.gating
    layer.eps, layer.scale, layer.rounds = gating.eps, gating.scale, gating.rounds
    if gating.norm is not None:
        width = len(gating.norm)
        require_tensor("norm", gating.norm, (None,), (dtype,))
        require(of.width % gating.part == 0 and width in (gating.part, of.width), f"norm has {width} weights")
        layer.norm, layer.norm_width, layer.norm_part = gating.norm.data_ptr(), width, gating.part
        layer.gates_first = gating.gates_first
    return layer


def _set_runs(layer: _Recurrence, part: StatePart) -> None:
    own = sum([run.stop - run.start for run in part.runs])
    require(own == layer.channels, f"part must be of {layer.channels} channels, got {own}")
    runs, begin = (_Run * len(part.runs))(), 0
    for place, run in enumerate(part.runs):
        end = begin + run.stop - run.start
        runs[place] = _Run(begin, end, run.start - begin)
        begin = end
    layer.kept_width, layer.num_runs, layer.runs = part.channels, len(runs), ctypes.addressof(runs)
    layer.held = runs  # as long as the layer is
