"""Decode attention: 1 to 16 queries per sequence, in buffers that never move, so that a CUDA graph can hold it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels import tuning
from pdserve.kernels.attention import AttentionSpec, PlanTensors, Program, Scales
from pdserve.kernels.attention_plan import ITEM_FIELDS, MERGE_FIELDS, Cutting, Ints, split_work
from pdserve.kernels.checks import require, require_lens, require_page_table

MAX_QUERY_LEN = 16
MAX_ROWS = 128


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step a captured graph serves."""

    max_seqs: int
    max_query_len: int  # tokens per sequence: 1, or more to verify speculated ones
    max_kv_len: int

    def __post_init__(self) -> None:
        """Raise ValueError naming the first field out of range."""
        width_fits = 1 <= self.max_query_len <= MAX_QUERY_LEN
        require(width_fits, f"max_query_len must be 1 to {MAX_QUERY_LEN}, got {self.max_query_len}")
        require(self.max_seqs >= 1, f"max_seqs must be positive, got {self.max_seqs}")
        length_fits = self.max_kv_len >= self.max_query_len
        require(length_fits, f"max_kv_len must be at least max_query_len, got {self.max_kv_len}")


class Decode:
    """Attention for a decode step. `run` may be captured once; `plan` then changes what replays compute."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device | str,
        size: StepSize,
        *,
        chip: tuning.Device | None = None,
        tile: tuning.Tile | None = None,
    ) -> None:
        """Allocate what a step of that size needs. `chip` and `tile` override the device and the tuning table."""
        self.spec = spec
        self.device = torch.device(device)
        self.size = size
        chip = chip or tuning.device_of(str(self.device))
        rows = min(MAX_ROWS, max(16, 1 << (size.max_query_len * spec.group - 1).bit_length()))
        self.tile = tile or tuning.decode_tile(chip, spec.demand, rows)
        on_gpu = self.device.type != "cpu"
        self.program = Program.choose(spec, self.tile, chip, heads_inner=True, on_gpu=on_gpu)
        tokens_per_item = min(size.max_query_len, self.tile.block_m // spec.group)
        max_blocks = size.max_seqs * -(-size.max_query_len // tokens_per_item)
        slots = chip.num_sms * self.tile.items_per_sm
        self._cutting = Cutting(
            tokens_per_item=tokens_per_item,
            tile=self.tile.block_n,
            num_kv_heads=spec.num_kv_heads,
            slots=slots,
            window=spec.window,
            max_items=max_blocks + 2 * -(-slots // spec.num_kv_heads),
        )
        table_shape = (size.max_seqs, -(-size.max_kv_len // spec.page_size))
        self._buffers = _Buffers(self._cutting, max_blocks, table_shape, self.device)
        self._plan = self._buffers.plan(spec, self.tile, size.max_seqs * size.max_query_len)

    def plan(self, query_lens: Ints, kv_lens: Ints, page_table: Ints) -> None:
        """Cut the step into items and send them to the fixed buffers.

        query_lens: [num_seqs], each 1..max_query_len; kv_lens counts those queries' own positions.
        page_table: [num_seqs, columns], the pages of each sequence in order. Raises ValueError naming the argument.
        """
        require_lens(query_lens, kv_lens)
        size, num_seqs = self.size, len(query_lens)
        require(num_seqs <= size.max_seqs, f"query_lens: {num_seqs} sequences, {size.max_seqs} at most")
        longest = int(query_lens.max())
        require(longest <= size.max_query_len, f"query_lens must be at most {size.max_query_len}, got {longest}")
        longest = int(kv_lens.max())
        require(longest <= size.max_kv_len, f"kv_lens must be at most {size.max_kv_len}, got {longest}")
        require_page_table(page_table, kv_lens, self.spec.page_size, self.spec.num_pages)
        work = split_work(query_lens, kv_lens, self._cutting)
        self._buffers.fill(work.items, work.merges, page_table)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, scales: Scales | None = None
    ) -> Tensor:
        """Attend. q: [max_seqs * max_query_len, num_heads, head_dim], the planned tokens first.

        Rows past the planned tokens are neither read nor written. Returns `out`, or a fresh tensor like q.
        """
        return self.program.launch(self._plan, q, (k, v), out, scales)


class _Buffers:
    """The plan's place on the device and its pinned image on the host: one copy a step, addresses fixed."""

    def __init__(self, cutting: Cutting, max_blocks: int, table_shape: tuple[int, int], device: torch.device) -> None:
        assert cutting.max_items is not None
        self._shapes = ((cutting.max_items, ITEM_FIELDS), (max_blocks, MERGE_FIELDS), table_shape)
        sizes = [rows * columns for rows, columns in self._shapes]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None
        self._host_parts = [
            part.numpy().reshape(shape) for part, shape in zip(self._host.split(sizes), self._shapes, strict=True)
        ]
        self._device_parts = [
            part.view(shape) for part, shape in zip(self._device.split(sizes), self._shapes, strict=True)
        ]

    def plan(self, spec: AttentionSpec, tile: tuning.Tile, num_tokens: int) -> PlanTensors:
        """Return the device's side, with room for every item to be a partial one."""
        items, merges, table = self._device_parts
        rows = (len(items), spec.num_kv_heads, tile.block_m)
        partials = torch.empty((*rows, spec.head_dim), dtype=torch.float32, device=items.device)
        lse = torch.empty(rows, dtype=torch.float32, device=items.device)
        return PlanTensors(items, merges, table, partials, lse, num_tokens)

    def fill(self, items: Ints, merges: Ints, page_table: Ints) -> None:
        """Write a step's plan; entries not used are zero, which the kernels skip."""
        if self._sent is not None:
            self._sent.synchronize()  # the last step's copy may still read the host image
        for part, values in zip(self._host_parts, (items, merges), strict=False):
            part[: len(values)] = values
            part[len(values) :] = 0
        columns = min(page_table.shape[1], self._shapes[2][1])
        self._host_parts[2][: len(page_table), :columns] = page_table[:, :columns].astype(np.int32)
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
