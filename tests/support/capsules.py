"""What goes with the pages of a prompt."""

from pdserve.kvtransfer.session import Capsule, Tail
from pdserve.protocol.sampling import SampledToken


def capsule(num_tokens: int, *first: tuple[int, int]) -> Capsule:
    """Return the capsule of a prompt with the (index, first token) of each continuation that goes on."""
    return Capsule(num_tokens, tuple(Tail(index, (SampledToken(token),)) for index, token in first))
