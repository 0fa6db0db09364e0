"""Tokens as the router's core sees them."""

from collections.abc import Sequence as Seq
from typing import Protocol


class TokenDelta(Protocol):
    """Tokens of one sequence, as they came off the wire.

    The one place where a protobuf message passes through the core: copying 256 of them a step into values of our
    own would cost a third of the step's budget. `logprobs` is opaque; `finish_reason` is 0 until the sequence ends.
    """

    @property
    def request_id(self) -> bytes: ...
    @property
    def attempt(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def token_ids(self) -> Seq[int]: ...
    @property
    def logprobs(self) -> Seq[object]: ...
    @property
    def finish_reason(self) -> int: ...
