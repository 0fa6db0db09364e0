"""What is made of a prompt in place of an answer: a vector of its final hidden states, or logits behind its last token.

A vector travels as little-endian float32.
"""

from typing import Literal

from pdserve.base.values import value
from pdserve.protocol.refusal import invalid

FLOAT_BYTES = 4
MAX_LOGITS = 64  # tokens whose logits one request may ask for
Kind = Literal["last", "mean", "logits"]


@value
class Pooling:
    """Which states: those of the last token, or the mean over all; or logits that follow the last token.

    Hidden states are taken behind the model's last norm. `token_ids`: whose logits, where these are wanted.
    """

    kind: Kind
    token_ids: tuple[int, ...] = ()
    normalizes: bool = False  # the vector's length becomes 1

    @property
    def reads_all(self) -> bool:
        """Whether hidden states of all tokens are needed: no cached prefix is of use then."""
        return self.kind == "mean"

    def fits(self, vector: bytes) -> bool:
        """Say whether a vector may be the result; how long a hidden state is, only workers know."""
        if self.kind == "logits":
            return len(vector) == FLOAT_BYTES * len(self.token_ids)
        return len(vector) > 0 and len(vector) % FLOAT_BYTES == 0

    def validate(self, vocab_size: int) -> None:
        """Raise RefusedError(INVALID_ARGUMENT) that names what is wrong."""
        if (self.kind == "logits") is not bool(self.token_ids) or len(self.token_ids) > MAX_LOGITS:
            raise invalid("pooling.token_ids", f"{len(self.token_ids)} were given; 1 to {MAX_LOGITS} go with logits")
        for token_id in self.token_ids:
            if not 0 <= token_id < vocab_size:
                raise invalid("pooling.token_ids", f"{token_id} is outside [0, {vocab_size - 1}]")
