"""Tokenizers built from small GGUF files: against transformers where it follows the file, else against ids by hand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_tokenizer import SPLITS, build_tokenizer
from pdserve.checkpoint.open import open_checkpoint
from pdserve.text.tokenizer import Tokenizer

WriteGguf = Callable[[str, Mapping[str, object], Mapping[str, object]], Path]

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, they'LL say; we've 1,000,000 of them!",
    "def main(args):\n    for i in range(100):\n        print(i, 'done')\n\n\nif True:\n\treturn 42\r\n",
    "L'été à Málaga fût très chaud: 35°C. Привет, мир! 日本語のテキスト 12月31日. 😀😀 emoji 👍🏽",
    "HTTPServer CamelCase snake_case  two  spaces   three\n \n  mixed  \n\n1. one\n\n2. two",
] * 3
SPECIAL = ["<|begin|>", "<|end|>"]
TEXTS = [
    *CORPUS[:4],
    *(
        "",
        " ",
        "   ",
        "x  1",
        "\n\n1",
        "12",
        "1234567",
        " 12 34",
        "'S 'lL",
        "\r\n\r\n",
        "tab\t\tx",
        "é",
        "\U0001d518",
        "\x00",
    ),
    *("<|begin|>", "a<|end|>b", " <|begin|> 1", "<think>x</think>", "a <think> b", "<|begin", "▁", "<0x41>"),
]
PARTS = [*"abeT019 \n\r\t'.!é日😀_▁", "<|begin|>", "<think>", "<0x41>", "th", "he", "ow", "in"]
SPELLED = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def byte_level_keys(pre: str) -> dict[str, object]:
    """Train a small vocabulary under one of the pre-tokenizers and write it as llama.cpp's converter does."""
    backend = tokenizers.Tokenizer(models.BPE())
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre].patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, in_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    vocab = backend.get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), *SPECIAL, "<think>", "</think>"]
    merges = [" ".join(pair) for pair in _merges(backend)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3, 3, 4, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.add_bos_token": SPLITS[pre].add_bos,
    }


def _merges(backend: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def sentencepiece_keys(*, add_bos: bool) -> dict[str, object]:
    """Train a small vocabulary with SentencePiece's spelling; each token's score is minus its rank."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    backend.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    vocab = backend.get_vocab()
    words = sorted(vocab, key=lambda token: vocab[token])
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*head, *words, *SPECIAL],
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(rank) for rank in range(len(words))] + [0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": add_bos,
    }


Pair = tuple[Tokenizer, PreTrainedTokenizerBase]


@pytest.fixture
def read_both(
    write_gguf: WriteGguf, tiny_model: dict[str, object], embedding: Mapping[str, object]
) -> Callable[[str, dict[str, object]], Pair]:
    def read(architecture: str, keys: dict[str, object]) -> Pair:
        model = {f"{architecture}.{key}": value for key, value in tiny_model.items()}
        path = write_gguf(architecture, model | keys, embedding)
        reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return open_checkpoint(path).tokenizer(), reference

    return read


def assert_same_ids(pair: Pair) -> None:
    ours, reference = pair

    def compare(text: str) -> None:
        assert ours.encode(text, add_special=False) == reference(text, add_special_tokens=False).input_ids
        if not text.startswith("<|begin|>"):  # transformers would add a second one
            assert ours.encode(text, add_special=True) == reference(text).input_ids

    for text in TEXTS:
        compare(text)
    settings(max_examples=150, deadline=None)(given(SPELLED)(compare))()


@pytest.mark.parametrize(
    ("architecture", "pre"),
    [("llama", "llama-bpe"), ("llama", "tekken"), ("qwen2", "qwen2"), ("llama", "gpt-2")],
)
def test_byte_level_ids_equal_transformers(
    read_both: Callable[[str, dict[str, object]], Pair], architecture: str, pre: str
) -> None:
    assert_same_ids(read_both(architecture, byte_level_keys(pre)))


SPLIT_TEXT = "It'S  a1234.5=x\n\n12 日本語 foo/bar\r\n(x)"
ONE_DIGIT = "It|'|S| | a|1|2|3|4|.|5|=|x|\n\n|1|2| 日本語| foo|/|bar|\r|\n|(|x|)"
SINGLY = "It|'|S| | a|1|2|3|4|.|5|=|x|\n|\n|1|2| |日本語| foo|/|bar|\r|\n|(|x|)"
WORDS = {  # cut by hand from llama.cpp's patterns, at each |
    "default": "It|'|S| | a|123|4|.|5|=|x|\n|\n|12| 日本語| foo|/|bar|\r\n|(|x|)",
    "gpt-2": "It|'|S| | a|1234|.|5|=|x|\n|\n|12| 日本語| foo|/|bar|\r|\n|(|x|)",
    "smollm": ONE_DIGIT,
    "starcoder": ONE_DIGIT,
    "llama-bpe": "It|'S| | a|123|4|.|5|=x|\n\n|12| 日本語| foo|/bar|\r\n|(x|)",
    "qwen2": "It|'S| | a|1|2|3|4|.|5|=x|\n\n|1|2| 日本語| foo|/bar|\r\n|(x|)",
    "qwen35": "It|'S| | a|1|2|3|4|.|5|=x|\n\n|1|2| 日本語| foo|/bar|\r\n|(x|)",
    "gpt-4o": "It'S| | a|123|4|.|5|=x|\n\n|12| 日本語| foo|/bar|\r\n|(x|)",
    "tekken": "It|'S| | a|1|2|3|4|.|5|=x|\n\n|1|2| 日本語| foo|/bar|\r\n|(x|)",
    "falcon": "It|'|S| | a|123|4|.|5|=|x|\n|\n|12| 日本語| foo|/|bar|\r\n|(|x|)",
    "deepseek-coder": SINGLY,
    "deepseek-llm": SINGLY,
    "deepseek-v3": "It|'S| | a|123|4|.|5|=x|\n\n|12| |日本語| foo|/bar|\r\n|(x|)",
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_cut_where_the_name_says(tokenizer_keys: dict[str, object], pre: str) -> None:
    assert words_of(SPLIT_TEXT, tokenizer_keys, pre) == WORDS[pre].split("|")


def words_of(text: str, tokenizer_keys: dict[str, object], pre: str) -> list[str]:
    backend = build_tokenizer(tokenizer_keys | {"tokenizer.ggml.pre": pre})
    return [text[first:last] for _, (first, last) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-llm", "Ба| Բ|արեւ|,| αβ| +=|Ꞑ| a|Ꞑ|½|א|  "),  # small Armenian letters and late Latin ones are none
        ("deepseek-coder", "Ба| Բարեւ|,| αβ| +=|Ꞑ| aꞐ|½|א|  "),
    ],
)
def test_deepseeks_splits_differ_in_letters(tokenizer_keys: dict[str, object], pre: str, words: str) -> None:
    assert words_of(words.replace("|", ""), tokenizer_keys, pre) == words.split("|")


@pytest.mark.parametrize(("pre", "words"), [("qwen2", "cafe|\u0301s| a"), ("qwen35", "cafe\u0301s| a")])
def test_qwen35_keeps_marks_with_the_letters_before_them(
    tokenizer_keys: dict[str, object], pre: str, words: str
) -> None:
    assert words_of(words.replace("|", ""), tokenizer_keys, pre) == words.split("|")


def test_a_file_that_names_no_split_is_read_as_default(tokenizer_keys: dict[str, object]) -> None:
    named = build_tokenizer(tokenizer_keys | {"tokenizer.ggml.pre": "default"})
    del tokenizer_keys["tokenizer.ggml.pre"]
    assert build_tokenizer(tokenizer_keys).pre_tokenizer.pre_tokenize_str(SPLIT_TEXT) == (
        named.pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)
    )


@pytest.mark.parametrize("add_bos", [True, False])
def test_sentencepiece_ids_equal_transformers(
    read_both: Callable[[str, dict[str, object]], Pair], add_bos: bool
) -> None:
    assert_same_ids(read_both("llama", sentencepiece_keys(add_bos=add_bos)))


def test_sentencepiece_decodes_as_transformers_does(
    read_both: Callable[[str, dict[str, object]], Pair],
) -> None:
    ours, reference = read_both("llama", sentencepiece_keys(add_bos=True))
    for text in TEXTS:
        ids = ours.encode(text, add_special=True)
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_sentencepiece_merges_the_best_scored_pair_first() -> None:
    keys: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc"],
        "tokenizer.ggml.add_space_prefix": False,
    }
    for scores, ids in (([0.0, 0.0, 0.0, -1.0, -2.0], [3, 2]), ([0.0, 0.0, 0.0, -2.0, -1.0], [0, 4])):
        assert build_tokenizer(keys | {"tokenizer.ggml.scores": scores}).encode("abc").ids == ids


def test_a_file_may_ask_for_no_space_before_a_text() -> None:
    keys = sentencepiece_keys(add_bos=False)
    with_space = Tokenizer(build_tokenizer(keys))
    without = Tokenizer(build_tokenizer(keys | {"tokenizer.ggml.add_space_prefix": False}))
    assert with_space.encode("the", add_special=False) == without.encode(" the", add_special=False)
    assert without.decode(without.encode(" the", add_special=False)) == " the"


def test_llama3_words_that_are_tokens_stay_whole_without_merges() -> None:
    keys: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "c", "abc"],
        "tokenizer.ggml.merges": [],
    }
    assert build_tokenizer(keys).encode("abc").ids == [3]
    assert build_tokenizer(keys | {"tokenizer.ggml.pre": "qwen2"}).encode("abc").ids == [0, 1, 2]


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_bos_is_added_where_such_files_do_not_say(pre: str) -> None:
    keys = byte_level_keys(pre)
    del keys["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer(keys).encode("x").ids[0] == keys["tokenizer.ggml.bos_token_id"]


def test_bos_is_not_added_to_a_text_that_has_it() -> None:
    keys = byte_level_keys("llama-bpe")
    bos = keys["tokenizer.ggml.bos_token_id"]
    assert isinstance(bos, int)
    tokenizer = Tokenizer(build_tokenizer(keys), bos)
    assert tokenizer.encode("<|begin|>x", add_special=True) == tokenizer.encode("x", add_special=True)
    assert tokenizer.encode("x", add_special=True)[0] == bos
    unasked = Tokenizer(build_tokenizer(keys | {"tokenizer.ggml.add_bos_token": False}), bos)
    assert unasked.encode("<|begin|><|begin|>", add_special=True) == [bos, bos]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model: 'bert'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, r"tokenizer\.ggml\.pre: 'kimi-k2'"),
        ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens: missing"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type: 1 entries for 4"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"tokenizer\.ggml\.merges: 'ab'"),
        ({"tokenizer.ggml.merges": ["b a"]}, r"tokenizer\.ggml\.merges: .*ba"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores: not one number"),
    ],
)
def test_metadata_that_cannot_be_followed_are_refused_by_key(
    tokenizer_keys: dict[str, object], changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_tokenizer(tokenizer_keys | changes)
