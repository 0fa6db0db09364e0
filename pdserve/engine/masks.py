"""Which tokens may be sampled for sequences whose text has to match a grammar.

A mask depends on the sample's specification alone, which includes the answer so far. So a matcher keeps nothing but a
cache between steps: after a hand-off, a move or a preemption, another matcher continues from the tokens.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.base.errors import GrammarError
from pdserve.engine.step import Bits, SampleSpec

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step's samples with a grammar. Allowed tokens, bad words and forbidden stops are part of them."""

    rows: tuple[int, ...]  # ascending: the samples that have one
    bits: npt.NDArray[np.int32]  # [len(rows), words]
    stuck: Mapping[int, str]  # why nothing can follow, by sample; these have no mask


NO_MASKS = TokenMasks((), np.empty((0, 0), np.int32), {})


def token_masks(specs: Seq[SampleSpec], vocab_size: int, eos_token_ids: Seq[int]) -> TokenMasks:
    """Compute the masks of a step's samples."""
    found: dict[int, Bits] = {}
    stuck: dict[int, str] = {}
    for row, spec in enumerate(specs):
        try:
            if (bits := _mask(spec, vocab_size, eos_token_ids)) is not None:
                found[row] = bits
        except GrammarError as error:
            stuck[row] = str(error)
    bits = np.stack(list(found.values())) if found else NO_MASKS.bits
    return TokenMasks(tuple(found), bits, stuck)


def _mask(spec: SampleSpec, vocab_size: int, eos_token_ids: Seq[int]) -> Bits | None:
    if spec.matcher is None:
        return None
    bits = np.zeros(-(-vocab_size // WORD_BITS), np.int32)
    spec.matcher.fill(spec.output_ids, bits)
    if spec.params.allowed_token_ids:
        bits &= packed(spec.params.allowed_token_ids, vocab_size)
        if not bits.any():
            raise GrammarError("the grammar lets none of allowed_token_ids follow")
    without = [token_id for token_id in unwanted(spec, eos_token_ids) if 0 <= token_id < vocab_size]
    wanted = bits & ~packed(without, vocab_size) if without else bits
    return wanted if wanted.any() else bits


def unwanted(spec: SampleSpec, eos_token_ids: Seq[int]) -> tuple[int, ...]:
    """Return the tokens that are sampled only if no others can be: those of bad words, and early stops."""
    return spec.forbidden + ((*eos_token_ids, *spec.params.stop_token_ids) if spec.forbid_stops else ())


def packed(token_ids: Seq[int], vocab_size: int) -> Bits:
    """Return the mask of these tokens."""
    bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return a mask as a bool for each token: [vocab_size]."""
    return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
