"""Paged attention, of prefill and decode alike: plan once per step, run once per layer.

q: [num_tokens, num_heads, head_dim]; k, v: [num_pages, num_kv_heads, page_size, head_dim], one layer's strided views
of the page-major pool, with the same strides; coded rows are bytes, [.., `KvRows.width`]. Of latent rows, both are one
tensor: see `AttentionSpec.value_dim`.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.kernels import tuning
from pdserve.kernels.attention_plan import COMBINE_FIELDS, ITEM_FIELDS, Cutting, Ints, pages_in_use, split_work
from pdserve.kernels.checks import require, require_lens, require_page_table, require_tensor, require_words
from pdserve.kernels.device import attention as device_attention
from pdserve.kernels.kv_rows import KvRows
from pdserve.kernels.staging import Staging, aligned, padded
from pdserve.protocol.kvlayout import KvCode

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAGE_SIZES = (16, 32, 64, 128)  # and multiples of the last: no tile of keys is larger
MAX_HEAD_DIM = 256
MAX_VALUE_DIM, MAX_TAIL = 512, 64  # of a latent row
MAX_GROUP = 128
WORD = 4  # bytes: rows of codes begin at multiples of them, which the compiler cannot see in a stride
LOG2_E = math.log2(math.e)
COMBINE_SPLITS = 16  # partial results the combine kernel holds at a time
COMBINE_WARPS = 4
PARTIALS_BYTES = 64 << 20  # of split items' results: some four for each item that an H200 runs at a time


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention, as far as it does not change between steps."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int  # in the pool
    scale: float  # of q·k, usually head_dim ** -0.5
    dtype: torch.dtype = torch.bfloat16  # of queries, keys and values
    window: int | None = None  # positions a query sees, its own included
    soft_cap: float | None = None  # c of c * tanh(score / c)
    has_sinks: bool = False  # a score of each head joins each softmax, without a value
    value_dim: int | None = None  # of latent rows: the whole row is the key of all heads, its first features the value
    code: KvCode | None = None  # rows of K and V are bytes, as `kernels.kv_rows` says

    def __post_init__(self) -> None:
        """Raise ValueError naming the first field the kernels do not serve."""
        require(self.num_kv_heads >= 1, f"num_kv_heads must be positive, got {self.num_kv_heads}")
        ratio_fits = self.num_heads % self.num_kv_heads == 0 and 1 <= self.group <= MAX_GROUP
        require(ratio_fits, f"num_heads must be 1 to {MAX_GROUP} times num_kv_heads, got {self.num_heads}")
        if self.value_dim is not None:
            self._check_latents(self.value_dim)
        most = MAX_HEAD_DIM if self.value_dim is None else MAX_VALUE_DIM + MAX_TAIL
        dim_fits = self.head_dim % 16 == 0 and 16 <= self.head_dim <= most
        require(dim_fits, f"head_dim must be a multiple of 16 up to {most}, got {self.head_dim}")
        size_fits = self.page_size in PAGE_SIZES or self.page_size % PAGE_SIZES[-1] == 0
        require(size_fits, f"page_size must be one of {PAGE_SIZES} or a multiple of the last, got {self.page_size}")
        require(self.num_pages >= 1, f"num_pages must be positive, got {self.num_pages}")
        require(self.dtype in QUERY_DTYPES, f"dtype must be one of {QUERY_DTYPES}, got {self.dtype}")
        require(math.isfinite(self.scale) and self.scale > 0, f"scale must be positive, got {self.scale}")
        require(self.window is None or self.window >= 1, f"window must be positive, got {self.window}")
        cap = 1.0 if self.soft_cap is None else self.soft_cap
        require(0 < cap < math.inf, f"soft_cap must be positive, got {self.soft_cap}")

    def _check_latents(self, value_dim: int) -> None:
        require(self.num_kv_heads == 1, f"num_kv_heads must be 1 of latent rows, got {self.num_kv_heads}")
        value_fits = value_dim % 8 == 0 and 16 <= value_dim <= MAX_VALUE_DIM
        require(value_fits, f"value_dim must be a multiple of 8 from 16 to {MAX_VALUE_DIM}, got {value_dim}")
        fits = 1 <= self.tail <= MAX_TAIL
        require(fits, f"head_dim must be 1 to {MAX_TAIL} more than value_dim {value_dim}, got {self.head_dim}")
        is_plain = self.window is None and self.soft_cap is None and not self.has_sinks and self.code is None
        require(is_plain, "value_dim: latent rows are served without window, soft_cap, sinks and code")

    @property
    def width(self) -> int:
        """Features of a value, and of a result."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def tail(self) -> int:
        """Features of a key that are none of its value; 0: K and V are apart."""
        return self.head_dim - self.width

    @property
    def rows(self) -> KvRows:
        """How K and V of a token and head lie in a page."""
        return KvRows(self.head_dim, self.dtype, self.code)

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        """width rounded up to a power of two."""
        return 1 << (self.width - 1).bit_length()


def check_inputs(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError naming the argument whose shape, dtype or strides do not fit `spec`."""
    require_tensor("q", q, (None, spec.num_heads, spec.head_dim), (spec.dtype,))
    rows = spec.rows
    pool = (spec.num_pages, spec.num_kv_heads, spec.page_size, rows.width)
    for name, pages in (("k", k), ("v", v)):
        require_tensor(name, pages, pool, (rows.pool_dtype,))
        if spec.code is not None:
            require_words(name, pages)
        else:  # 16-byte loads: each row must start on a multiple of 16 elements
            aligned = all(stride % 16 == 0 for stride in pages.stride()[:-1])
            require(aligned, f"{name} must have strides in multiples of 16 elements, got {pages.stride()}")
        require(pages.device == q.device, f"{name} must be on {q.device}, got {pages.device}")
    require(k.stride() == v.stride(), f"v must have the strides of k, {k.stride()}, got {v.stride()}")
    require(v is k or spec.tail == 0, "v must be k: latent rows are both")


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step of single tokens that a captured graph serves."""

    max_seqs: int
    max_kv_len: int

    def __post_init__(self) -> None:
        """Raise ValueError naming the first field out of range."""
        require(self.max_seqs >= 1, f"max_seqs must be positive, got {self.max_seqs}")
        require(self.max_kv_len >= 1, f"max_kv_len must be positive, got {self.max_kv_len}")

    def check(self, query_lens: Ints, kv_lens: Ints) -> None:
        require(len(query_lens) <= self.max_seqs, f"query_lens: {len(query_lens)} sequences, {self.max_seqs} at most")
        for name, lens, limit in (("query_lens", query_lens, 1), ("kv_lens", kv_lens, self.max_kv_len)):
            require(int(lens.max()) <= limit, f"{name} must be at most {limit}, got {int(lens.max())}")


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's plan on the device."""

    items: Tensor  # int32 [num_items, ITEM_FIELDS]
    combines: Tensor  # int32 [num_combines, COMBINE_FIELDS]
    pages: Tensor  # int32 [num_pages]: those of all sequences, one sequence after another
    num_tokens: int


def room_for_partials(device: torch.device) -> Tensor:
    """Return memory for the results of split items, float32, which any launches of one stream may share."""
    return torch.empty(PARTIALS_BYTES // 4, dtype=torch.float32, device=device)


class PagedAttention:
    """Attention of one spec on one device.

    Without a size, a step may have chunks of any lengths. With one, it has at most that many sequences of one token
    each, and nothing moves between two steps: `run` may be captured once, and `plan` then changes what replays compute.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device | str,
        size: StepSize | None = None,
        *,
        chip: tuning.Device | None = None,
        tile: tuning.Tile | None = None,
        room: Tensor | None = None,
    ) -> None:
        """Choose the launch parameters. `chip` overrides what the device is, `tile` the tuning table.

        room: `room_for_partials`, shared with others; its own unless given.
        """
        self.spec, self.size = spec, size
        self.device = torch.device(device)
        chip = chip or tuning.device_of(str(self.device))
        self.tile = tile or _tile(spec, chip, size)
        self._blocks = _head_blocks(spec, self.tile)
        self._group, self._grid_heads = spec.group // self._blocks, spec.num_kv_heads * self._blocks
        # K and V tiles through tensor descriptors.
        fits_page = spec.page_size >= self.tile.block_n and spec.tail == 0 and spec.code is None
        self.use_tma = chip.capability >= (9, 0) and fits_page and spec.dtype != torch.float32
        self._unit = 1 if spec.code is None else WORD
        self.exact = spec.dtype == torch.float32 or self.device.type == "cpu"  # multiply in float32
        rows = self._grid_heads * self.tile.block_m  # of one item's results
        room = room_for_partials(self.device) if room is None else room
        max_partials = len(room) // (rows * (spec.width + 1))
        self._partials, self._lse = room[: max_partials * rows * spec.width], room[-max_partials * rows :]
        self._cutting = _cutting(spec, chip, self.tile, size, (self._blocks, max_partials))
        self._staging = Staging(self.device)
        self._sources: dict[tuple[int, ...], TensorDescriptor] = {}  # by address and strides
        self._plan: _Plan | None = None
        if size is not None:
            self._set_up(size)

    def plan(self, query_lens: Ints, kv_lens: Ints, page_table: Ints) -> None:
        """Cut the step into items and send them to the device.

        query_lens, kv_lens: [num_seqs]; the queries are each sequence's last positions, and kv_lens counts them.
        page_table: [num_seqs, columns], the pages of each sequence in order. Raises ValueError naming the argument.
        """
        require_lens(query_lens, kv_lens)
        if self.size is not None:
            self.size.check(query_lens, kv_lens)
        require_page_table(page_table, kv_lens, self.spec.page_size)
        work = split_work(query_lens, kv_lens, self._cutting)
        pages = pages_in_use(page_table, kv_lens, self.spec.page_size)
        if self.size is None:
            items, combines, in_use = self._staging.send(work.items, work.combines, pages)
            self._plan = _Plan(items, combines, in_use, int(query_lens.sum()))
        else:
            parts = zip((work.items, work.combines), self._shapes, strict=True)
            self._staging.send(*[padded(part, shape) for part, shape in parts], pages)

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """Attend. q: the planned tokens, one sequence after another; with a size, `size.max_seqs` rows.

        sinks: float32 [num_heads], where the spec has them.
        Rows past the planned tokens are neither read nor written. Returns `out` [len(q), num_heads, width].
        """
        spec, tile, plan = self.spec, self.tile, self._plan
        if plan is None:
            raise ValueError("plan must be called before run")
        check_inputs(spec, q, k, v)
        require((sinks is not None) == spec.has_sinks, "sinks must be given where the spec has them, and only there")
        if sinks is not None:
            require_tensor("sinks", sinks, (spec.num_heads,), (torch.float32,))
        require(q.shape[0] >= plan.num_tokens, f"q must hold the {plan.num_tokens} planned tokens, got {q.shape[0]}")
        shape = (len(q), spec.num_heads, spec.width)
        out = q.new_empty(shape) if out is None else out
        require_tensor("out", out, shape, (q.dtype,))
        grid = (len(plan.items), self._grid_heads) if self.size is None else (self._grid_heads, len(plan.items))
        if spec.tail > 0:
            k, v = k[..., : spec.width], k[..., spec.width :]
        device_attention.attend[grid](
            q, self._source(k), self._source(v), sinks, out, self._partials, self._lse, plan.items, plan.pages,
            *q.stride()[:2], *[stride // self._unit for stride in k.stride()[:3]], *out.stride()[:2],
            *_score_factors(spec), spec.window or 0, self._grid_heads,
            **self._constants(), num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.max_registers,
        )  # fmt: skip
        if len(plan.combines) > 0:
            rows = self._cutting.tokens_per_item * self._group
            device_attention.combine[len(plan.combines), self._grid_heads, rows](
                sinks, out, self._partials, self._lse, plan.combines, *out.stride()[:2], self._grid_heads,
                GROUP=self._group, HEAD_DIM=spec.width, BLOCK_D=spec.block_d, BLOCK_M=tile.block_m,
                BLOCK_S=COMBINE_SPLITS, HAS_SINKS=spec.has_sinks, num_warps=COMBINE_WARPS,
            )  # fmt: skip
        return out

    def _set_up(self, size: StepSize) -> None:
        """Plan an empty step in memory that never moves: the kernels skip entries that are zero."""
        max_items, max_pages = self._cutting.max_items, size.max_seqs * -(-size.max_kv_len // self.spec.page_size)
        assert max_items is not None
        self._shapes = (max_items, ITEM_FIELDS), (size.max_seqs, COMBINE_FIELDS)
        self._staging = Staging(self.device, sum(map(aligned, (*map(math.prod, self._shapes), max_pages))))
        nothing = [np.zeros(shape, np.int32) for shape in (*self._shapes, (max_pages,))]
        items, combines, pages = self._staging.send(*nothing)
        self._plan = _Plan(items, combines, pages, size.max_seqs)

    def _constants(self) -> dict[str, int | bool | str]:
        spec, tile = self.spec, self.tile
        return {
            "GROUP": self._group,
            "HEAD_DIM": spec.width,
            "BLOCK_D": spec.block_d,
            "TAIL": spec.tail,
            "BLOCK_T": max(16, 1 << max(0, spec.tail - 1).bit_length()),
            "PAGE_SIZE": spec.page_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            # Neighbours in the grid share keys' pages where queries are few, else a K/V head.
            "HEADS_INNER": self.size is not None,
            "HAS_WINDOW": spec.window is not None,
            "HAS_CAP": spec.soft_cap is not None,
            "HAS_SINKS": spec.has_sinks,
            "PRECISION": "ieee" if self.exact else "native",
            "USE_TMA": self.use_tma,
            "CODE": spec.code or "",
            "UNIT": self._unit,
        }

    def _source(self, pages: Tensor) -> Tensor | TensorDescriptor:
        """Return what the kernel reads K or V through."""
        if not self.use_tma:
            return pages
        key = (pages.data_ptr(), *pages.stride())
        if key not in self._sources:
            block = [1, 1, self.tile.block_n, self.spec.block_d]
            self._sources[key] = TensorDescriptor(pages, list(pages.shape), list(pages.stride()), block)
        return self._sources[key]


def _score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """Return what the kernel multiplies products with, and what the tanh of that, where there is a cap.

    The results are powers of two, and a tanh is computed by one: tanh(x) = 1 - 2 / (2 ** (2 x log2(e)) + 1).
    """
    if spec.soft_cap is None:
        return spec.scale * LOG2_E, 1.0
    return 2 * LOG2_E * spec.scale / spec.soft_cap, spec.soft_cap * LOG2_E


def _tile(spec: AttentionSpec, chip: tuning.Device, size: StepSize | None) -> tuning.Tile:
    if spec.tail > 0:
        return tuning.latent_tile(chip, spec.dtype.itemsize, None if size is None else spec.group)
    if size is None:
        is_coded = spec.code is not None
        return tuning.prefill_tile(chip, spec.block_d, spec.dtype.itemsize, spec.page_size, is_coded=is_coded)
    rows = max(16, 1 << (spec.group - 1).bit_length())
    return tuning.decode_tile(chip, spec.block_d, spec.dtype.itemsize, spec.page_size, rows)


def _head_blocks(spec: AttentionSpec, tile: tuning.Tile) -> int:
    """Return into how many equal parts the heads that share a key are divided, so that each fits a tile."""
    blocks = -(-spec.group // tile.block_m)
    require(blocks == 1 or spec.tail > 0, f"num_heads: {spec.group} per K/V head do not fit a tile")
    return next(count for count in range(blocks, spec.group + 1) if spec.group % count == 0)


def _cutting(
    spec: AttentionSpec, chip: tuning.Device, tile: tuning.Tile, size: StepSize | None, room: tuple[int, int]
) -> Cutting:
    """Return how a step is cut. room: blocks of heads, and how many partial results there is room for."""
    (blocks, max_partials), max_items = room, None
    num_heads, slots = spec.num_kv_heads * blocks, chip.num_sms * tile.items_per_sm
    tokens_per_item = tile.block_m * blocks // spec.group
    if size is not None:
        tokens_per_item, max_items = 1, size.max_seqs + 2 * -(-slots // num_heads)
    limits = (max_items, max_partials)
    return Cutting(tokens_per_item, tile.block_n, num_heads, slots, spec.page_size, spec.window, *limits)
