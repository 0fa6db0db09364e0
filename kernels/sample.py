"""Sample tokens for a batch of rows with mixed sampling parameters, in one launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.checks import require, require_tensor
from pdserve.kernels.device import sample as device_sample
from pdserve.kernels.pageio import power_of_two

MAX_BLOCK = 4096  # logits a program looks at together
BIAS_BLOCK = 64
COUNT_BLOCK = 256
NUM_WARPS = 16
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASK_BITS = 32  # in a word
EVERYTHING = -1  # in place of a row's mask


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: row i is values[offsets[i]:offsets[i + 1]]; offsets int32 [num_rows + 1]."""

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """float32 [num_rows] each, and the int32 ids they look at. 1, 0 and 0 leave a row as it is."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    prompt_ids: Ragged
    output_ids: Ragged


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

    Order: repetition, frequency and presence penalty, mask, bias, temperature, top-k, top-p, min-p, noise
    (exactly: `tests/support/reference_kernels.py`). Raises ValueError naming the argument that does not fit.
    """
    require_tensor("logits", logits, (None, None), LOGIT_DTYPES)
    num_rows, vocab_size = logits.shape
    require(vocab_size >= 1, f"logits must have at least one column, got {list(logits.shape)}")
    _check(num_rows, params, penalties, bias)
    _check_mask(num_rows, vocab_size, mask)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    counts = params.top_k if penalties is None else _count(penalties, num_rows, vocab_size)
    changed = penalties is not None or bias is not None or mask is not None
    scratch = torch.empty((num_rows, vocab_size) if changed else (1, 1), dtype=torch.float32, device=logits.device)
    unit, none = params.temperature, params.top_k
    device_sample.sample[(num_rows,)](
        out, logits, scratch, params.keys, params.temperature, params.top_k, params.top_p, params.min_p,
        penalties.repetition if penalties else unit, penalties.frequency if penalties else unit,
        penalties.presence if penalties else unit, counts,
        bias.ids if bias else none, bias.values if bias else unit, bias.offsets if bias else none,
        mask.words if mask else none, mask.rows if mask else none,
        vocab_size, logits.stride(0), scratch.stride(0), counts.stride(0), mask.words.stride(0) if mask else 0,
        HAS_COUNTS=penalties is not None, HAS_BIAS=bias is not None, HAS_MASK=mask is not None,
        BLOCK=min(MAX_BLOCK, power_of_two(vocab_size)), BIAS_BLOCK=BIAS_BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _count(penalties: Penalties, num_rows: int, vocab_size: int) -> Tensor:
    """Count each row's ids: int32 [num_rows, vocab_size], 2 per occurrence in the output, 1 if in the prompt."""
    counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=penalties.repetition.device)
    for ids, is_output in ((penalties.prompt_ids, False), (penalties.output_ids, True)):
        device_sample.count_ids[(num_rows,)](
            counts, ids.values, ids.offsets, counts.stride(0), OUTPUT=is_output, BLOCK=COUNT_BLOCK, num_warps=4
        )
    return counts


def _check_mask(num_rows: int, vocab_size: int, mask: Mask | None) -> None:
    if mask is not None:
        require_tensor("mask.words", mask.words, (None, None), (torch.int32,))
        num_bits = mask.words.shape[1] * MASK_BITS
        require(num_bits >= vocab_size, f"mask.words must have a bit for {vocab_size} tokens, got {num_bits}")
        require(mask.words.stride(1) == 1, "mask.words must have rows that are contiguous")
        require_tensor("mask.rows", mask.rows, (num_rows,), (torch.int32,))


def _check(num_rows: int, params: Params, penalties: Penalties | None, bias: Bias | None) -> None:
    """Raise ValueError naming the first per-row tensor of the wrong shape or dtype."""
    require_tensor("keys", params.keys, (num_rows, 2), (torch.int32,))
    require(params.keys.is_contiguous(), "keys must be contiguous")
    require_tensor("top_k", params.top_k, (num_rows,), (torch.int32,))
    rows = {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
    offsets = {}
    if penalties is not None:
        rows |= {name: getattr(penalties, name) for name in ("repetition", "frequency", "presence")}
        for name, ids in (("prompt_ids", penalties.prompt_ids), ("output_ids", penalties.output_ids)):
            require_tensor(name, ids.values, (None,), (torch.int32,))
            offsets[f"{name}.offsets"] = ids.offsets
    if bias is not None:
        require_tensor("bias.ids", bias.ids, (None,), (torch.int32,))
        require_tensor("bias.values", bias.values, bias.ids.shape, (torch.float32,))
        offsets["bias.offsets"] = bias.offsets
    for name, tensor in rows.items():
        require_tensor(name, tensor, (num_rows,), (torch.float32,))
    for name, tensor in offsets.items():
        require_tensor(name, tensor, (num_rows + 1,), (torch.int32,))
