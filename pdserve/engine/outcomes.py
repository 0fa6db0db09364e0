"""What a committed step brought each of its sequences. Pure values."""

from pdserve.engine.sequence import Finish, Sequence
from pdserve.engine.step import SampledToken
from pdserve.values import value


@value
class Drawn:
    """A sequence gained a token. `position` counts the tokens generated before it, from the request's start."""

    sequence: Sequence
    index: int
    position: int
    token: SampledToken
    finish: Finish | None


@value
class Started:
    """A sequence was in a step for the first time."""

    sequence: Sequence


@value
class Computed:
    """A chunk of a prompt is done: KV of tokens[:sequence.computed] is final."""

    sequence: Sequence


@value
class Split:
    """A prompt's continuations go separate ways; those that ended with their first token are not among them."""

    sequence: Sequence
    children: tuple[Sequence, ...]


@value
class Broken:
    """A sequence could not be computed. It is no longer running, and keeps its pages until it is removed."""

    sequence: Sequence
    reason: str


Outcome = Drawn | Started | Computed | Split | Broken
