"""Log probabilities of tokens in the two forms that OpenAI's API has for them.

Invariant: the keys of one position's `top_logprobs` are distinct, and the chosen token's is the name in `tokens`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # instead of minus infinity, which JSON cannot express


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How a response writes tokens: `token_id:123` with `as_ids`, else as their texts."""

    tokenizer: Tokenizer
    as_ids: bool = False

    def of(self, token_id: int) -> str:
        r"""Return a token's name. A token that is no text by itself is written as its bytes: `bytes:\xf0\x9f`."""
        if self.as_ids:
            return _id_name(token_id)
        piece = self.tokenizer.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return _byte_name(piece)

    def by_name(self, chosen_id: int, logprobs: inference.TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens and the chosen one, by distinct names.

        Where several have the same text, it names the chosen one, or else the likeliest. The others are `token_id:123`.
        """
        top = {each.token_id: each.logprob for each in logprobs.top}
        of_names = {self.of(token_id): token_id for token_id in (*reversed(top), chosen_id)}
        top.setdefault(chosen_id, logprobs.chosen)
        named = {token_id: name for name, token_id in of_names.items()}
        return {named.get(token_id, _id_name(token_id)): _finite(logprob) for token_id, logprob in top.items()}

    def num_chars(self, token_ids: Iterable[int]) -> int:
        """Return how many characters tokens begin. The text of whole characters has as many."""
        pieces = map(self.tokenizer.piece, token_ids)
        return sum(byte & 0xC0 != 0x80 for piece in pieces for byte in piece)  # these bytes go on with a character


def chat_logprobs(
    names: TokenNames, ids: Sequence[int], logprobs: Sequence[inference.TokenLogprobs], _offset: int = 0
) -> dict[str, Any]:
    """Return them as chat.completion has them: one entry for each token."""
    content = [
        {
            **_entry(names, token_id, each.chosen),
            "top_logprobs": [_entry(names, top.token_id, top.logprob) for top in each.top],
        }
        for token_id, each in zip(ids, logprobs, strict=True)
    ]
    return {"content": content}


def completion_logprobs(
    names: TokenNames, ids: Sequence[int], logprobs: Sequence[inference.TokenLogprobs | None], offset: int = 0
) -> dict[str, Any]:
    """Return them as text_completion has them: parallel lists. The text offsets, in characters, begin at `offset`.

    `logprobs` has None for the first token of a prompt.
    """
    offsets = []
    for token_id in ids:
        offsets.append(offset)
        offset += names.num_chars((token_id,))
    return {
        "tokens": list(map(names.of, ids)),
        "token_logprobs": [None if each is None else _finite(each.chosen) for each in logprobs],
        "top_logprobs": [
            None if each is None else names.by_name(token_id, each)
            for token_id, each in zip(ids, logprobs, strict=True)
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
                    "decoded_token": tokens.piece(found).decode(errors="replace"),
                }
                for found, (rank, logprob) in ranked.items()
            }
        )
    return scored


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    name, piece = names.of(token_id), names.tokenizer.piece(token_id)
    return {"token": name, "logprob": _finite(logprob), "bytes": list(piece)}


def _byte_name(piece: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else LEAST
