"""tokenizer.model gives the ids of the library that wrote it; what is not converted is refused with a way out."""

import base64
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from sentencepiece import sentencepiece_model_pb2
from transformers import LlamaConfig

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.open import open_checkpoint
from pdserve.text.tokenizer import LLAMA3_WORDS, Tokenizer

WORDS = "the quick brown fox jumps over a lazy dog hello world tokens models are many 123 456 été größe 日本語 λόγος"
SAMPLES = [
    *(
        "hello world",
        "the quick\nbrown\tfox",
        "été größe naïve",
        "日本語 λόγος 🙂",
        "123456 tokens",
        "",
        "a",
        "trailing  ",
    ),
    *("line\n\nline", "two  spaces   three", "x" * 70, "don't DON'T", "a\r\n b", "mixed日本hello"),
]
LEADING = [" two", "  leading", " ", "\n x", "\u2581 odd"]
WITHOUT_CHANGES = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "character_coverage": 1.0,
    "allow_whitespace_only_pieces": True,
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ADDED = {"content": "<|turn|>", "special": True}


def random_texts(seed: int, count: int) -> list[str]:
    rng, letters = random.Random(seed), [*WORDS, "\n", "  ", "\t", "🙂", "'", "!"]
    return ["a" + "".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(count)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    LlamaConfig(vocab_size=500, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return tmp_path


Train = Callable[..., sentencepiece.SentencePieceProcessor]


@pytest.fixture
def train(directory: Path) -> Train:
    """Return what writes a SentencePiece model and the tokenizer's config, and opens the first with its library."""

    def write(config: dict[str, Any] | None = None, **options: Any) -> sentencepiece.SentencePieceProcessor:  # noqa: ANN401
        rng, model = random.Random(1), io.BytesIO()
        texts = [" ".join(rng.choices(WORDS.split(), k=12)) for _ in range(300)]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            minloglevel=2,
            **{"model_type": "bpe", "vocab_size": 400, **WITHOUT_CHANGES, **options},
        )
        (directory / "tokenizer.model").write_bytes(model.getvalue())
        (directory / "tokenizer_config.json").write_text(json.dumps({**NAMES, **(config or {})}))
        return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    return write


def opened(directory: Path) -> Tokenizer:
    return open_checkpoint(directory).tokenizer()


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("adds_space", [True, False])
def test_ids_are_those_of_sentencepiece(train: Train, directory: Path, adds_space: bool, legacy: bool) -> None:
    theirs = train({"legacy": legacy}, add_dummy_prefix=adds_space, split_digits=True)
    ours = opened(directory)
    # Without `legacy`, transformers too takes the space that begins a text for the one that is put before it.
    leading = LEADING if legacy or not adds_space else []
    for text in (*SAMPLES, *leading, *random_texts(0, 300)):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.encode(text, add_special=True) == [theirs.bos_id(), *ids], text
        assert ours.decode(ids) == theirs.decode(ids), text


def test_user_defined_pieces_stay_whole(train: Train, directory: Path) -> None:
    theirs = train(user_defined_symbols=["<sep>", "🙂"])
    ours = opened(directory)
    for text in ("a🙂", "hello<sep>", "x🙂"):
        assert ours.encode(text, add_special=False) == theirs.encode(text), text


def test_added_tokens_go_behind_the_pieces_or_in_their_place(train: Train, directory: Path) -> None:
    train({"added_tokens_decoder": {"400": ADDED, "399": {"content": "<|instead|>", "special": False}}})
    ours = opened(directory)
    assert (ours.token_id("<|turn|>"), ours.token_id("<|instead|>"), ours.vocab_size) == (400, 399, 401)
    assert ours.encode("<|turn|>", add_special=False) == [400]
    assert ours.decode([400, 399]) == "<|instead|>", "special tokens are no text"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"added_tokens_decoder": {"402": ADDED}}, r"added_tokens_decoder: no token has the id 400"),
        ({"added_tokens_decoder": {"x": ADDED}}, r"added_tokens_decoder: 'x' is not a token id"),
        ({"added_tokens_decoder": {"400": {**ADDED, "lstrip": True}}}, r"'400' takes spaces around it"),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder: is not an object"),
        ({"bos_token": "<bos>"}, r"bos_token: '<bos>' is not among the tokens"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    train: Train, directory: Path, config: dict[str, Any], complaint: str
) -> None:
    train(config)
    with pytest.raises(ConfigError, match=complaint):
        opened(directory)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model_type": "unigram", "vocab_size": 310}, r"trainer_spec\.model_type: 1 is not supported \(2\)"),
        ({"normalization_rule_name": "nmt_nfkc"}, r"normalizer_spec\.precompiled_charsmap: True is not supported"),
        ({"remove_extra_whitespaces": True}, r"normalizer_spec\.remove_extra_whitespaces: True"),
        ({"byte_fallback": False, "vocab_size": 120}, r"trainer_spec\.byte_fallback: False"),
    ],
)
def test_other_kinds_of_sentencepiece_are_refused_by_their_key(
    train: Train, directory: Path, options: dict[str, Any], complaint: str
) -> None:
    train(**options)
    with pytest.raises(ConfigError, match=rf"tokenizer\.model: {complaint}.*save_pretrained"):
        opened(directory)


def test_without_sentencepiece_the_ways_out_are_named(
    train: Train, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    monkeypatch.setitem(sys.modules, sentencepiece_model_pb2.__name__, None)
    with pytest.raises(ConfigError, match=r"tokenizer\.model: .*pip install sentencepiece; or .*save_pretrained"):
        opened(directory)


def test_without_any_vocabulary_the_missing_files_are_named(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor tokenizer\.model; .*save_pretrained"):
        opened(directory)
    (directory / "tokenizer.model").write_bytes(b"\nnonsense")
    with pytest.raises(ConfigError, match=r"tokenizer\.model: is no SentencePiece model"):
        opened(directory)


def ranks() -> dict[bytes, int]:
    """Return bytes and then what byte pairs of words make, some of them of three parts."""
    rng, found = random.Random(2), [bytes([byte]) for byte in range(256)]
    while len(found) < 480:
        left, right = rng.choice(found[32:]), rng.choice(found[32:])
        word = rng.choice(WORDS.split()).encode()
        pieces = [word[i:j] for i in range(len(word)) for j in range(i + 2, len(word) + 1)] or [left + right]
        piece = rng.choice(pieces)
        if piece not in found and any(piece[:cut] in found and piece[cut:] in found for cut in range(1, len(piece))):
            found.append(piece)
    return {piece: rank for rank, piece in enumerate(found)}


def test_ids_of_a_list_of_ranks_are_those_of_tiktoken(directory: Path) -> None:
    by_rank = ranks()
    lines = [b"%s %d" % (base64.b64encode(piece), rank) for piece, rank in by_rank.items()]
    (directory / "tokenizer.model").write_bytes(b"\n".join(lines))
    added = {"480": {"content": "<|begin_of_text|>", "special": True}, "481": ADDED}
    config = {"added_tokens_decoder": added, "bos_token": "<|begin_of_text|>", "eos_token": "<|turn|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ours = opened(directory)
    special = {"<|begin_of_text|>": 480, "<|turn|>": 481}
    theirs = tiktoken.Encoding("test", pat_str=LLAMA3_WORDS, mergeable_ranks=by_rank, special_tokens=special)
    for text in (*SAMPLES, *LEADING, *random_texts(3, 300)):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.encode(text, add_special=True) == [480, *ids]
        assert ours.decode(ids) == text
    assert ours.encode("hello<|turn|>", add_special=False)[-1] == 481


def test_a_list_of_ranks_is_refused_where_the_words_are_not_known(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 2\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.model: line 2: is not a base64 and the rank 1"):
        opened(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["MistralForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"cut into words .* of LlamaForCausalLM alone"):
        opened(directory)
