"""A tokenizer whose tokens are all bytes and some words, so that what it allows can be enumerated."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.text.tokenizer import Tokenizer

END = 0
WORDS = ["</s>", "<pad>"]
LONGER = ["ab", "ba", "aab", '{"', '":', "true", "12", "Ġ[", '",', "Ċ", "bb]"]


def small_tokenizer() -> Tokenizer:
    """Return it; END is the only end, and <pad> is special too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = list(dict.fromkeys([*WORDS, *alphabet, *LONGER]))
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(WORDS)
    return Tokenizer(backend)
