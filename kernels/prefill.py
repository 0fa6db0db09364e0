"""Prefill attention: chunks of several sequences, of any lengths, in one launch without padding."""

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels import tuning
from pdserve.kernels.attention import AttentionSpec, PlanTensors, Program, Scales
from pdserve.kernels.attention_plan import ITEM_FIELDS, MERGE_FIELDS, Cutting, Int32s, Ints, WorkPlan, split_work
from pdserve.kernels.checks import require, require_lens, require_page_table


class Prefill:
    """Attention for a step's chunks. `plan` once per step, then `run` for each layer of the same spec."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device | str,
        *,
        chip: tuning.Device | None = None,
        tile: tuning.Tile | None = None,
    ) -> None:
        """Choose the launch parameters. `chip` overrides what the device is, `tile` what the tuning table says."""
        self.spec = spec
        self.device = torch.device(device)
        self._chip = chip or tuning.device_of(str(self.device))
        self.tile = tile or tuning.prefill_tile(self._chip, spec.demand)
        on_gpu = self.device.type != "cpu"
        self.program = Program.choose(spec, self.tile, self._chip, heads_inner=False, on_gpu=on_gpu)
        self._plan: PlanTensors | None = None

    def plan(self, query_lens: Ints, kv_lens: Ints, page_table: Ints) -> None:
        """Cut the step into items and send them to the device.

        query_lens, kv_lens: [num_seqs]; the queries are each sequence's last positions, and kv_lens counts them.
        page_table: [num_seqs, columns], the pages of each sequence in order. Raises ValueError naming the argument.
        """
        require_lens(query_lens, kv_lens)
        require_page_table(page_table, kv_lens, self.spec.page_size, self.spec.num_pages)
        require(self.spec.group <= self.tile.block_m, f"num_heads: {self.spec.group} per K/V head do not fit a tile")
        cutting = Cutting(
            tokens_per_item=self.tile.block_m // self.spec.group,
            tile=self.tile.block_n,
            num_kv_heads=self.spec.num_kv_heads,
            slots=self._chip.num_sms * self.tile.items_per_sm,
            window=self.spec.window,
        )
        work = split_work(query_lens, kv_lens, cutting)
        self._plan = self._send(work, page_table, int(query_lens.sum()))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, scales: Scales | None = None
    ) -> Tensor:
        """Attend. q: [num_tokens, num_heads, head_dim], the chunks one after another. Returns the same shape."""
        require(self._plan is not None, "plan must be called before run")
        assert self._plan is not None
        return self.program.launch(self._plan, q, (k, v), out, scales)

    def _send(self, work: WorkPlan, page_table: Ints, num_tokens: int) -> PlanTensors:
        """Copy items, merges and page table to the device in one transfer."""
        pieces: tuple[Int32s, ...] = (work.items, work.merges, page_table.astype(np.int32))
        flat = torch.from_numpy(np.concatenate([piece.reshape(-1) for piece in pieces]))
        if self.device.type == "cuda":
            flat = flat.pin_memory().to(self.device, non_blocking=True)
        items, merges, table = flat.split([piece.size for piece in pieces])
        rows = (work.num_partials, self.spec.num_kv_heads, self.tile.block_m)
        return PlanTensors(
            items.view(-1, ITEM_FIELDS),
            merges.view(-1, MERGE_FIELDS),
            table.view(page_table.shape),
            torch.empty((*rows, self.spec.head_dim), dtype=torch.float32, device=self.device),
            torch.empty(rows, dtype=torch.float32, device=self.device),
            num_tokens,
        )
