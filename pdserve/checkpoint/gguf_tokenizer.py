"""Build a tokenizer from a GGUF file's metadata.

With a byte-level vocabulary a text is cut into words before merging; `tokenizer.ggml.pre` says how. The patterns of a
split are applied one after another: each cuts the pieces so far into its matches and the text between them. A
look-ahead sees no further than the end of its piece. The names and their patterns are llama.cpp's
(`llama-vocab.cpp`), whose converter writes the key. Where llama.cpp rewrites a model's own pattern to suit its regular
expressions, we use the model's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from pdserve.base.errors import ConfigError
from pdserve.model.fields import Fields
from pdserve.text.detokenize import WORD_START
from pdserve.text.tokenizer import CONTRACTIONS, GPT2_WORDS, LETTERS, LLAMA3_WORDS, QWEN2_WORDS, SPACES


@dataclass(frozen=True, slots=True)
class Split:
    """What a name in `tokenizer.ggml.pre` stands for."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is never cut
    add_bos: bool = False  # if the file does not say


_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALIZED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)


def _either(*patterns: str) -> tuple[str]:
    return ("|".join(patterns),)


_GPT2 = Split((GPT2_WORDS,))
_DIGITS_FIRST = Split((r"\p{N}", GPT2_WORDS))
_DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))
_FALCON = Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]"))
_THREE_DIGITS = Split((LLAMA3_WORDS,))
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, add_bos=True)
_QWEN2 = Split((QWEN2_WORDS,))
_QWEN35 = Split(
    _either(CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES)
)
_SEED = Split(_either(CONTRACTIONS, LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", SPACES))
_TEKKEN = Split(_either(*_CAPITALIZED, r"\p{N}", _PATHS, SPACES), ignore_merges=True, add_bos=True)
_GPT4O = Split(_either(*(f"{word}{CONTRACTIONS}?" for word in _CAPITALIZED), r"\p{N}{1,3}", _PATHS, SPACES))
_ASIAN = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))
# The model's own ranges have all letters with a case but those that lie here.
_NOT_CASED = (
    r"\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{AB6F}"
    r"\x{10500}-\x{10C7F}\x{10D00}-\x{1189F}\x{118E0}-\x{1E8FF}"
)
_DEEPSEEK_LLM = Split(
    (
        r"[\r\n]",
        rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_NOT_CASED}]]+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
        _ASIAN,
        r"\p{N}",
    )
)
_DEEPSEEK_V3 = Split(
    (
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
    )
)


def _named(split: Split, names: Iterable[str]) -> dict[str, Split]:
    return dict.fromkeys(names, split)


SPLITS = {
    **_named(_DEFAULT, ["default"]),
    **_named(_GPT2, ["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"]),
    **_named(_DIGITS_FIRST, ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"]),
    **_named(_LLAMA3, ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"]),
    **_named(_THREE_DIGITS, ["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"]),
    **_named(_QWEN2, ["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"]),
    **_named(_GPT4O, ["gpt-4o", "llama4"]),
    "falcon": _FALCON,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "seed-coder": _SEED,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    **_named(_DEEPSEEK_V3, ["deepseek-v3", "hunyuan-dense"]),
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Return the tokenizer that the metadata describe; ConfigError names a key that is not supported."""
    fields = Fields(metadata)
    tokens = fields.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError("tokenizer.ggml.tokens: missing from the model's metadata")
    types = fields.token_ids("tokenizer.ggml.token_type") or (TokenType.NORMAL,) * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type: {len(types)} entries for {len(tokens)} tokens")
    match fields.text("tokenizer.ggml.model"):
        case "gpt2":
            backend, add_bos = _byte_level(fields, tokens)
        case "llama":
            backend, add_bos = _sentencepiece(metadata, tokens, types), True
        case _:
            raise fields.unsupported("tokenizer.ggml.model", "gpt2 or llama")
    _add_whole_tokens(backend, tokens, types)
    _add_ends(backend, _end(fields, tokens, "bos", default=add_bos), _end(fields, tokens, "eos", default=False))
    return backend


def _byte_level(fields: Fields, tokens: tuple[str, ...]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer, and whether a text begins with a bos token if the file does not say."""
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise fields.unsupported("tokenizer.ggml.pre", f"one of {', '.join(SPLITS)}")
    split = SPLITS[name]
    merges = [_pair(merge) for merge in fields.texts("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(_bpe(tokens, merges, ignore_merges=split.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, in_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ConfigError(f"tokenizer.ggml.merges: {merge!r} is not two tokens")
    return left, right


def _sentencepiece(
    metadata: Mapping[str, object], tokens: tuple[str, ...], types: tuple[int, ...]
) -> tokenizers.Tokenizer:
    fields = Fields(metadata)
    unknown = fields.optional_int("tokenizer.ggml.unknown_token_id")
    model = _bpe(
        tokens,
        _merges_by_score(_scores(metadata, len(tokens)), tokens, types),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    adds_space = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=WORD_START, prepend_scheme="first" if adds_space else "never", split=False
    )
    steps = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend


def _scores(metadata: Mapping[str, object], num_tokens: int) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != num_tokens:
        raise ConfigError(f"tokenizer.ggml.scores: not one number for each of {num_tokens} tokens")
    return [float(score) for score in scores]


def _merges_by_score(scores: Sequence[float], tokens: tuple[str, ...], types: tuple[int, ...]) -> list[tuple[str, str]]:
    """Return every way to make a token of two others, those with the best score first.

    SentencePiece merges the pair whose result scores best; a list of merges in that order does the same.
    """
    words = {
        token: scores[token_id]
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    return [
        (word[:cut], word[cut:])
        for word in sorted(words, key=lambda word: -words[word])
        for cut in range(len(word) - 1, 0, -1)
        if word[:cut] in words and word[cut:] in words
    ]


def _bpe(tokens: tuple[str, ...], merges: list[tuple[str, str]], **options: object) -> models.BPE:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"tokenizer.ggml.merges: {error}") from error


def _add_whole_tokens(backend: tokenizers.Tokenizer, tokens: tuple[str, ...], types: Iterable[int]) -> None:
    """Keep control and user-defined tokens whole wherever a text spells them."""
    added = [
        tokenizers.AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    backend.add_tokens(added)


def _end(fields: Fields, tokens: tuple[str, ...], end: str, *, default: bool) -> list[tuple[str, int]]:
    """Return the token to put at this end of each text, or nothing."""
    token_id = fields.optional_int(f"tokenizer.ggml.{end}_token_id")
    if token_id is None or not fields.flag(f"tokenizer.ggml.add_{end}_token", default=default):
        return []
    if not 0 <= token_id < len(tokens):
        raise fields.unsupported(f"tokenizer.ggml.{end}_token_id", f"one of {len(tokens)} tokens")
    return [(tokens[token_id], token_id)]


def _add_ends(backend: tokenizers.Tokenizer, first: list[tuple[str, int]], last: list[tuple[str, int]]) -> None:
    single = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*first, *last])
