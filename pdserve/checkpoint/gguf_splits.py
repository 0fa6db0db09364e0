"""How byte-level vocabularies cut a text into words before merging, by `tokenizer.ggml.pre`.

A split's patterns are applied one after another: each cuts the pieces that the ones before left, into its matches and
what lies between them. A look-ahead sees no further than the end of its piece. The names, and which patterns each
stands for, are llama.cpp's (`llama-vocab.cpp`), whose converter writes the key; where llama.cpp rewrites a model's own
pattern to suit its regular expressions, the model's own stands here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Split:
    """What a name in `tokenizer.ggml.pre` stands for."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is never cut
    add_bos: bool = False  # where the file does not say


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALIZED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _either(*patterns: str) -> tuple[str]:
    return ("|".join(patterns),)


_GPT2 = Split((_GPT2_WORDS,))
_DIGITS_FIRST = Split((r"\p{N}", _GPT2_WORDS))
_DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))
_FALCON = Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]"))
_THREE_DIGITS = Split(_either(_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, add_bos=True)
_QWEN2 = Split(_either(_CONTRACTIONS, _LETTERS, r"\p{N}", _SYMBOLS, _SPACES))
_SEED = Split(_either(_CONTRACTIONS, _LETTERS, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES))
_TEKKEN = Split(_either(*_CAPITALIZED, r"\p{N}", _PATHS, _SPACES), ignore_merges=True, add_bos=True)
_GPT4O = Split(_either(*(f"{word}{_CONTRACTIONS}?" for word in _CAPITALIZED), r"\p{N}{1,3}", _PATHS, _SPACES))
_DEEPSEEK_CODER = Split(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+", r"\p{N}")
)
_DEEPSEEK_V3 = Split(
    (
        r"\p{N}{1,3}",
        r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)


def _named(split: Split, names: Iterable[str]) -> dict[str, Split]:
    return dict.fromkeys(names, split)


SPLITS = {
    **_named(_DEFAULT, ["default"]),
    **_named(_GPT2, ["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"]),
    **_named(_DIGITS_FIRST, ["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"]),
    **_named(_LLAMA3, ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"]),
    **_named(_THREE_DIGITS, ["dbrx", "smaug-bpe", "chatglm-bpe"]),
    **_named(_QWEN2, ["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"]),
    **_named(_GPT4O, ["gpt-4o", "llama4"]),
    "falcon": _FALCON,
    "tekken": _TEKKEN,
    "seed-coder": _SEED,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
