"""Vectors of prompts: what a step makes of the chunks that want one. Float32, little end first."""

from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from pdserve.engine.batch import PooledChunk
from pdserve.model.family import Model


def pooled(model: Model, chunks: Seq[PooledChunk], hidden: Tensor, lasts: Tensor) -> dict[int, bytes]:
    """Return each chunk's vector by its place in the plan; of a mean, the sum over the chunk.

    hidden: [num_tokens, hidden_size], read only where a mean is wanted. lasts: [num chunks, hidden_size], of each
    chunk's last token. Of logits, the first rank's vectors alone mean something.
    """
    vectors: dict[int, bytes] = {}
    for each, last in zip(chunks, lasts, strict=True):
        match each.pooling.kind:
            case "last":
                vector = model.normed(last[None])[0].float()
            case "mean":
                vector = model.normed(hidden[each.rows]).float().sum(0)
            case "logits":
                vector = model.logits(last[None])[0].float()[list(each.pooling.token_ids)]
        vectors[each.place] = vector.numpy().astype("<f4", copy=False).tobytes()
    return vectors


def check_finite(vectors: dict[int, bytes]) -> None:
    """Raise ArithmeticError if one is not finite. Call it on the first rank, when no rank waits for a sum."""
    if not all(np.isfinite(np.frombuffer(each, "<f4")).all() for each in vectors.values()):
        raise ArithmeticError("a prompt's vector is not finite")
