"""Bugs on purpose in what workers report of their steps."""

from breaking import Original, breaks

from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.messages import Tokens
from pdserve.worker.reporting import StepReports


@breaks(StepReports, "_take_all")
def lose_a_sequence_whose_tokens_are_held(original: Original, self: StepReports, now_s: float) -> list[list[Tokens]]:
    """Send all but the last one's tokens, and drop those."""
    tokens: list[list[Tokens]] = original(self, now_s)
    return tokens[:-1] if len(tokens) > 1 else tokens


@breaks(StepReports, "rest")
def send_what_is_held_a_second_time(original: Original, self: StepReports, now_s: float) -> link.AttachRequest | None:
    """Keep what was sent, and send it with what comes next."""
    held = {name: list(tokens) for name, tokens in self._tokens.items()}
    message: link.AttachRequest | None = original(self, now_s)
    self._tokens.update(held)
    return message
