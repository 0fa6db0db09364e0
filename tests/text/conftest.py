"""Tokenizers of both kinds, over every byte and a few words."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level_backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", *alphabet, "he", "ðŁĺ", "Ģa", "ĠÃ", "©t"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>", "été \u2581x"])
    return backend


@pytest.fixture(scope="session")
def sentencepiece_backend() -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581he", "llo", "é", "<0xZZ>"]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


@pytest.fixture(scope="session")
def byte_level(byte_level_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_level_backend)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(sentencepiece_backend)
