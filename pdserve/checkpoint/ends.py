"""Tell a tokenizer which tokens to put at a text's ends."""

from collections.abc import Sequence

import tokenizers
from tokenizers import processors

NamedToken = tuple[str, int]  # spelling and id


def set_ends(backend: tokenizers.Tokenizer, first: Sequence[NamedToken], last: Sequence[NamedToken]) -> None:
    """Make encoding with special tokens add `first` before every text and `last` after it."""
    single = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*first, *last])
