"""Bugs on purpose in how vectors are made of prompts."""

from unittest.mock import patch

from breaking import Original, breaks

from pdserve.engine.prompt_room import PromptRoom
from pdserve.engine.sequence import Pooled, Sequence
from pdserve.protocol.pooling import Pooling


@breaks(PromptRoom, "begin")
def use_cached_pages_for_a_mean(original: Original, self: PromptRoom, sequence: Sequence) -> bool:
    """Leave out the hidden states of tokens whose KV is cached."""
    with patch.object(Pooling, "reads_all", False):
        return bool(original(self, sequence))


@breaks(Sequence, "_take_pooled")
def take_the_last_chunk_for_the_whole_prompt(original: Original, self: Sequence, vector: bytes) -> Pooled | None:
    """Forget what the chunks before have summed up."""
    self.pooled = b""
    taken: Pooled | None = original(self, vector)
    return taken
