"""Sample tokens for a batch of rows with mixed sampling parameters, in two launches of one variant each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.device import sample as device_sample
from pdserve.kernels.pageio import power_of_two

MAX_BLOCK = 2048  # logits a program looks at together: a part of a row
BIAS_BLOCK = 64
COUNT_BLOCK = 256
NUM_WARPS = 16
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASK_BITS = 32  # in a word
EVERYTHING = -1  # in place of a row's mask
NO_COUNTS = -1  # in place of a row's slot


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: row i is values[offsets[i]:offsets[i + 1]]; offsets int32 [num_rows + 1]."""

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """float32 [num_rows] each, and what they look at: rows of counts, which `count` writes and `sample` updates."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    slots: Tensor  # int32 [num_rows]: where in `counts` each row's are, no two in one; NO_COUNTS: it has no penalties
    counts: Tensor  # int32 [num_slots, vocab_size]: 2 per occurrence in the output, 1 if in the prompt


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to single logits: int32 ids (once per row each) and float32 values, of the same offsets.

    Ids outside the vocabulary are left out.
    """

    ids: Tensor
    values: Tensor
    offsets: Tensor  # int32 [num_rows + 1]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens may be sampled: bit i of words[j] says it of token 32 * j + i."""

    words: Tensor  # int32 [num_masks, at least vocab_size / 32]
    rows: Tensor  # int32 [num_rows]: each row's mask, or EVERYTHING


@dataclass(frozen=True, slots=True)
class Params:
    """Per-row parameters on the device. keys: those of `rng.keys`, as int32."""

    keys: Tensor  # int32 [num_rows, 2]
    temperature: Tensor  # float32; below GREEDY_BELOW: the largest logit
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32; 1: off
    min_p: Tensor  # float32; 0: off


def sample(
    logits: Tensor,
    params: Params,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """Sample one token per row. logits: [num_rows, vocab_size]. Returns int64 [num_rows].

    A token that is sampled for a row with counts is added to them as one of the output.
    Order: repetition, frequency and presence penalty, mask, bias, temperature, top-k, top-p, min-p, noise
    (exactly: `tests/support/reference_kernels.py`). Raises ValueError naming the argument that does not fit.
    """
    require_tensor("logits", logits, (None, None), LOGIT_DTYPES)
    num_rows, vocab_size = logits.shape
    require(vocab_size >= 1, f"logits must have at least one column, got {list(logits.shape)}")
    device, unit = logits.device, params.temperature
    nobody, ids = torch.full((num_rows,), NO_COUNTS, dtype=torch.int32, device=device), params.top_k[:0]
    if penalties is None:
        penalties = Penalties(unit, unit, unit, nobody, ids.new_empty((0, vocab_size)))
    if mask is None:
        mask = Mask(ids.new_empty((0, -(-vocab_size // MASK_BITS))), nobody)
    if bias is None:
        bias = Bias(ids, unit[:0], ids.new_zeros(num_rows + 1))
    _check(num_rows, vocab_size, params, penalties, bias)
    _check_mask(num_rows, vocab_size, mask)
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return out
    block = min(MAX_BLOCK, power_of_two(vocab_size))
    num_parts = -(-vocab_size // block)
    best = torch.empty((num_rows, 4, num_parts), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    scores = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    filters = params.keys, params.temperature, params.top_k, params.top_p, params.min_p
    counts = penalties.slots, penalties.counts
    device_sample.scan[(num_rows, num_parts)](
        best, tokens, logits, scores, *filters, penalties.repetition, penalties.frequency, penalties.presence, *counts,
        bias.ids, bias.values, bias.offsets, mask.words, mask.rows,
        vocab_size, num_parts, logits.stride(0), scores.stride(0), penalties.counts.stride(0), mask.words.stride(0),
        BLOCK=block, BIAS_BLOCK=BIAS_BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    device_sample.choose[(num_rows,)](
        out, best, tokens, scores, *filters, *counts,
        vocab_size, num_parts, scores.stride(0), penalties.counts.stride(0),
        BLOCK=block, PARTS=power_of_two(num_parts), num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def count(counts: Tensor, slots: Tensor, is_output: Tensor, ids: Ragged) -> None:
    """Add lists of token ids, all in the vocabulary, to rows of `Penalties.counts`; several may go to one row.

    slots: int32 [num_lists]; is_output: int32 [num_lists], 0 for a prompt; ids: int32 values.
    """
    require_tensor("counts", counts, (None, None), (torch.int32,))
    require_tensor("slots", slots, (None,), (torch.int32,))
    require_tensor("is_output", is_output, slots.shape, (torch.int32,))
    require_tensor("ids.values", ids.values, (None,), (torch.int32,))
    require_tensor("ids.offsets", ids.offsets, (len(slots) + 1,), (torch.int32,))
    device_sample.count_ids[(len(slots),)](
        counts, slots, is_output, ids.values, ids.offsets, counts.stride(0), BLOCK=COUNT_BLOCK, num_warps=4
    )


def _check_mask(num_rows: int, vocab_size: int, mask: Mask) -> None:
    require_tensor("mask.words", mask.words, (None, None), (torch.int32,))
    num_bits = mask.words.shape[1] * MASK_BITS
    require(num_bits >= vocab_size, f"mask.words must have a bit for {vocab_size} tokens, got {num_bits}")
    require(mask.words.stride(1) == 1, "mask.words must have rows that are contiguous")
    require_tensor("mask.rows", mask.rows, (num_rows,), (torch.int32,))


def _check(num_rows: int, vocab_size: int, params: Params, penalties: Penalties, bias: Bias) -> None:
    """Raise ValueError naming the first tensor of the wrong shape or dtype."""
    require_tensor("keys", params.keys, (num_rows, 2), (torch.int32,))
    require(params.keys.is_contiguous(), "keys must be contiguous")
    require_tensor("top_k", params.top_k, (num_rows,), (torch.int32,))
    rows = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
    rows |= {name: getattr(penalties, name) for name in ("repetition", "frequency", "presence")}
    for name, tensor in rows.items():
        require_tensor(name, tensor, (num_rows,), (torch.float32,))
    require_tensor("slots", penalties.slots, (num_rows,), (torch.int32,))
    require_tensor("counts", penalties.counts, (None, vocab_size), (torch.int32,))
    require_tensor("bias.ids", bias.ids, (None,), (torch.int32,))
    require_tensor("bias.values", bias.values, bias.ids.shape, (torch.float32,))
    require_tensor("bias.offsets", bias.offsets, (num_rows + 1,), (torch.int32,))
