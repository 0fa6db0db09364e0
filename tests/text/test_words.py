"""Texts that are encoded word by word have the ids that they have as a whole, whatever came before."""

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

from pdserve.checkpoint.gguf_tokenizer import SPLITS
from pdserve.text import tokenizer
from pdserve.text.tokenizer import MAX_CHARS, Words, may_cut

MERGES = [("h", "e"), ("Ġ", "a"), ("Ġa", "b"), ("Ġ", "5"), ("'", "s"), (".", "Ġ"), ("b", "Ġ"), ("Ġ", "Ġ"), ("5", "5")]
TEXTS = st.lists(
    st.sampled_from(
        ["a", "b", "he", " ", " ab", " a", "5", "'s", "'S", ".", "\n", "é", "\u0301", "\x85", "<s>", " <s>"]
    )
).map("".join)


def made(pre: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer whose merges would go over every cut that is none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = ["<s>", *alphabet, *(one + other for one, other in MERGES)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocab)}, merges=MERGES))
    backend.pre_tokenizer = pre
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def cut_by(name: str) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name].patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


BACKENDS = {
    "byte level": made(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    **{name: made(cut_by(name)) for name in ("gpt-2", "smollm", "llama3", "qwen2")},
}
BACKENDS["qwen2"].normalizer = normalizers.NFC()
KNOWN = {name: Words(backend) for name, backend in BACKENDS.items()}  # through all examples


@pytest.mark.parametrize("name", BACKENDS)
@given(text=TEXTS, add_special=st.booleans())
def test_a_text_has_the_ids_that_it_has_as_a_whole(name: str, text: str, *, add_special: bool) -> None:
    assert may_cut(BACKENDS[name])
    whole = BACKENDS[name].encode(text, add_special_tokens=add_special).ids
    for _ in range(2):  # with words that are new, and with words that are known
        assert KNOWN[name].encode(text, add_special=add_special) == whole


def test_words_that_are_too_many_or_too_long_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_WORDS", 5)
    known = Words(BACKENDS["llama3"])
    for text in ("a b a", "c d e f g", "h " + "b" * MAX_CHARS, "a b c d"):
        assert known.encode(text, add_special=False) == BACKENDS["llama3"].encode(text, add_special_tokens=False).ids
        assert len(known._known) <= 5
        assert all(len(word) <= MAX_CHARS for word in known._known)


def lone(token: AddedToken) -> Callable[[tokenizers.Tokenizer], object]:
    return lambda backend: backend.add_tokens([token])


@pytest.mark.parametrize(
    "change",
    [
        lone(AddedToken("b ", normalized=False)),
        lone(AddedToken("<t>", rstrip=True)),
        lone(AddedToken("<t>", single_word=True)),
        lambda backend: backend.enable_truncation(8),
        lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(backend, "pre_tokenizer", cut_by("deepseek-v3")),
    ],
)
def test_a_tokenizer_that_may_go_over_a_cut_encodes_whole_texts(
    change: Callable[[tokenizers.Tokenizer], object],
) -> None:
    backend = made(pre_tokenizers.ByteLevel(add_prefix_space=False))
    assert may_cut(backend)
    change(backend)
    assert not may_cut(backend)
