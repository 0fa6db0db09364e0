"""Log probabilities of tokens in the two forms that OpenAI's API has for them."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # instead of minus infinity, which JSON cannot express


def chat_logprobs(tokens: Tokenizer, ids: Sequence[int], logprobs: Sequence[inference.TokenLogprobs]) -> dict[str, Any]:
    """Return them as chat.completion has them: one entry for each token."""
    content = [
        {
            **_entry(tokens, token_id, each.chosen),
            "top_logprobs": [_entry(tokens, top.token_id, top.logprob) for top in each.top],
        }
        for token_id, each in zip(ids, logprobs, strict=True)
    ]
    return {"content": content}


def completion_logprobs(
    tokens: Tokenizer, ids: Sequence[int], logprobs: Sequence[inference.TokenLogprobs | None], offset: int = 0
) -> dict[str, Any]:
    """Return them as text_completion has them: parallel lists. The text offsets, in characters, begin at `offset`.

    `logprobs` has None for the first token of a prompt.
    """
    texts = [_text(tokens.piece(token_id)) for token_id in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if each is None else _finite(each.chosen) for each in logprobs],
        "top_logprobs": [
            None if each is None else _likeliest(tokens, text, each) for text, each in zip(texts, logprobs, strict=True)
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokens: Tokenizer, ids: Sequence[int], logprobs: Sequence[inference.TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """Return those of a prompt as vLLM has them: by token id, with the rank if it is known; None for the first."""
    scored: list[dict[str, Any] | None] = [None]
    for token_id, each in zip(ids[1:], logprobs, strict=True):
        ranked = {top.token_id: (rank, top.logprob) for rank, top in enumerate(each.top, 1)}
        ranked.setdefault(token_id, (0, each.chosen))
        scored.append(
            {
                str(found): {
                    "logprob": _finite(logprob),
                    "rank": rank or None,
                    "decoded_token": _text(tokens.piece(found)),
                }
                for found, (rank, logprob) in ranked.items()
            }
        )
    return scored


def _likeliest(tokens: Tokenizer, text: str, logprobs: inference.TokenLogprobs) -> dict[str, float]:
    likeliest: dict[str, float] = {}
    for top in logprobs.top:
        likeliest.setdefault(_text(tokens.piece(top.token_id)), _finite(top.logprob))
    likeliest.setdefault(text, _finite(logprobs.chosen))
    return likeliest


def _entry(tokens: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokens.piece(token_id)
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else LEAST
