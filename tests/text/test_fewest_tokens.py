"""No tokenizer encodes a text in fewer tokens than its length says."""

import unicodedata
from collections import defaultdict
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from pdserve.text.fewest_tokens import NFC_SHRINKS, Fewest, fewest

Change = Callable[[tokenizers.Tokenizer], object]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["he", "hehe", "    ", "\n", "é", "e\u0301", "\u212a", "\u0390", "\u1f82", "<s>", "a b"]),
        st.text(max_size=4),
    ),
    max_size=12,
).map("".join)


def bpe(pieces: list[str], merges: list[tuple[str, str]], **options: object) -> tokenizers.Tokenizer:
    vocabulary = [*pieces, *(one + other for one, other in merges)]
    model = models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=merges, **options)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>"])
    return backend


def byte_level(*, lacks: str = "") -> tokenizers.Tokenizer:
    pieces = sorted(set(pre_tokenizers.ByteLevel.alphabet()).difference(lacks))
    backend = bpe(pieces, [("h", "e"), ("he", "he"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©"), ("Î", "Ĳ")])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    space = "\u2581"
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), space, "h", "e"]
    merges = [("h", "e"), (space, "he"), (space, space), (space * 2, space * 2)]
    backend = bpe(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    return backend


def changed(made: tokenizers.Tokenizer, change: Change) -> tokenizers.Tokenizer:
    change(made)
    return made


def with_normalizer(normalizer: normalizers.Normalizer) -> Change:
    return lambda backend: setattr(backend, "normalizer", normalizer)


def with_cuts(cuts: pre_tokenizers.PreTokenizer) -> Change:
    return lambda backend: setattr(backend, "pre_tokenizer", cuts)


def with_token(token: AddedToken) -> Change:
    return lambda backend: backend.add_tokens([token])


WORDS = pre_tokenizers.Split(Regex(r"\w+"), "isolated")
KNOWN = {
    "byte level": byte_level(),
    "byte level, NFC": changed(byte_level(), with_normalizer(normalizers.NFC())),
    "byte level, split": changed(
        byte_level(), with_cuts(pre_tokenizers.Sequence([WORDS, pre_tokenizers.ByteLevel(False, use_regex=False)]))
    ),
    "byte level, bytes are missing": byte_level(lacks="xâģ"),
    "byte level, added": changed(byte_level(), with_token(AddedToken("a b" * 40))),
    "sentencepiece": sentencepiece(),
    "sentencepiece, added": changed(sentencepiece(), with_token(AddedToken("a b", normalized=True))),
    "metaspace": changed(
        changed(sentencepiece(), with_normalizer(normalizers.Sequence([]))),
        with_cuts(pre_tokenizers.Metaspace(split=False)),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
@given(text=TEXTS)
def test_a_text_has_at_least_as_many_tokens_as_its_length_says(name: str, text: str) -> None:
    bound = fewest(KNOWN[name])
    assert bound is not None
    assert bound.of(text) <= len(KNOWN[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", KNOWN)
def test_the_longest_token_alone_is_one(name: str) -> None:
    bound = fewest(KNOWN[name])
    assert bound is not None
    assert (bound.of(""), bound.of("y" * bound.longest), bound.of("y" * (bound.longest + 1))) == (0, 1, 2)


@pytest.mark.parametrize(
    "backend",
    [
        changed(byte_level(), with_token(AddedToken("<t>", rstrip=True))),
        changed(byte_level(), with_token(AddedToken("<t>", lstrip=True))),
        changed(byte_level(), lambda backend: backend.enable_truncation(8)),
        changed(byte_level(), with_normalizer(normalizers.NFKC())),
        changed(byte_level(lacks="x"), with_normalizer(normalizers.NFC())),
        changed(byte_level(), with_normalizer(normalizers.Strip())),
        changed(byte_level(), with_normalizer(normalizers.Replace(Regex(" +"), " "))),
        changed(sentencepiece(), with_normalizer(normalizers.NFC())),
        changed(sentencepiece(), with_normalizer(normalizers.Replace("  ", " "))),
        changed(sentencepiece(), with_cuts(pre_tokenizers.WhitespaceSplit())),
        changed(
            byte_level(),
            with_cuts(
                pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False, use_regex=False)]
                )
            ),
        ),
        bpe(["h", "e", "<unk>"], [("h", "e")], unk_token="<unk>", fuse_unk=True),
        bpe(["h", "e"], [("h", "e")]),
        bpe([f"<0x{byte:02X}>" for byte in range(256)], [], unk_token="<0x00>", fuse_unk=True),
        tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    ],
)
def test_no_bound_is_told_where_a_token_may_cover_text_of_any_length(backend: tokenizers.Tokenizer) -> None:
    assert fewest(backend) is None


def test_half_a_surrogate_pair_has_a_length_as_well() -> None:
    assert Fewest(2, in_bytes=True).of("a\ud800") == 2


def test_normalization_shrinks_no_text_by_more_than_the_factor() -> None:
    def num_bytes(text: str) -> int:
        return len(text.encode())

    points = (*range(0xD800), *range(0xE000, 0x20000), *range(0x2F800, 0x2FA20))  # no other has a decomposition
    characters = [*map(chr, points)]
    share: defaultdict[str, float] = defaultdict(float)  # of the bytes of a character that stands for several
    for char in characters:
        parts = unicodedata.normalize("NFD", char)
        for part in parts:
            share[part] = max(share[part], num_bytes(char) / len(parts))
    composed = (char for char in characters if unicodedata.is_normalized("NFC", char))
    longest = max(sum(map(share.__getitem__, unicodedata.normalize("NFD", c))) / num_bytes(c) for c in composed)
    assert 3 < longest <= NFC_SHRINKS
