"""Make a tokenizer of tokenizer.model, for directories without tokenizer.json.

The file is a SentencePiece model, or a list of byte sequences by rank (tiktoken). Of the first, those are converted
whose tokens are merged by score (BPE) and whose texts are not changed before: the ids are those of the sentencepiece
package. The second does not say how texts are cut into words; only Llama 3's way is known here.
"""

import base64
import binascii
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_tokenizer import TokenType, build_tokenizer
from pdserve.model.fields import Fields
from pdserve.text.detokenize import BYTE_OF, WORD_START

FILE = "tokenizer.model"
BPE = 2  # sentencepiece's number of the model
LLAMA3_ARCHITECTURE = "LlamaForCausalLM"
NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}


def command(path: Path) -> str:
    """Return the command that makes tokenizer.json where transformers is installed."""
    name = repr(str(path))
    code = f"from transformers import AutoTokenizer as A; A.from_pretrained({name}).save_pretrained({name})"
    return f'python -c "{code}"'


def read_vocabulary(
    path: Path, tokenizer_config: Mapping[str, object], architecture: str
) -> tuple[tokenizers.Tokenizer, int | None]:
    """Return the tokenizer of a directory's tokenizer.model, and its bos token.

    ConfigError names the file or key, and the command that makes tokenizer.json.
    """
    file = path / FILE
    if not file.is_file():
        raise ConfigError(f"holds neither tokenizer.json nor {FILE}; make the first with: {command(path)}")
    try:
        content = file.read_bytes()
        metadata = _ranks(content, architecture) if _is_tiktoken(content) else _pieces(content)
        metadata |= _named(metadata, tokenizer_config)
        backend = build_tokenizer(metadata)
    except ConfigError as error:
        raise ConfigError(f"{FILE}: {error}; or make tokenizer.json where transformers is: {command(path)}") from error
    if metadata["tokenizer.ggml.model"] == "llama" and Fields(tokenizer_config).flag("legacy", default=True):
        _prepend_everywhere(backend, Fields(metadata))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return backend, bos if isinstance(bos, int) else None


def _is_tiktoken(content: bytes) -> bool:
    """Say whether a file is lines of a base64 and a number each. A SentencePiece model begins with a line break."""
    first = content.split(b"\n", 1)[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit()


def _pieces(content: bytes) -> dict[str, Any]:
    """Return a SentencePiece model as the metadata of a GGUF file."""
    try:
        module = import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        raise ConfigError(f"needs a package that is missing ({error}): pip install sentencepiece") from error
    model = module.ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf's, of which sentencepiece says nothing
        raise ConfigError(f"is no SentencePiece model ({error})") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    for key, given, served in (
        ("trainer_spec.model_type", trainer.model_type, BPE),
        ("trainer_spec.byte_fallback", trainer.byte_fallback, True),
        ("trainer_spec.treat_whitespace_as_suffix", trainer.treat_whitespace_as_suffix, False),
        ("normalizer_spec.precompiled_charsmap", bool(normalizer.precompiled_charsmap), False),
        ("normalizer_spec.remove_extra_whitespaces", normalizer.remove_extra_whitespaces, False),
        ("normalizer_spec.escape_whitespaces", normalizer.escape_whitespaces, True),
    ):
        if given != served:
            raise ConfigError(f"{key}: {given} is not supported ({served})")
    ids = {"bos": trainer.bos_id, "eos": trainer.eos_id, "unknown": trainer.unk_id}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in model.pieces],
        "tokenizer.ggml.add_space_prefix": normalizer.add_dummy_prefix,
        **{f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items() if token_id >= 0},
    }


def _ranks(content: bytes, architecture: str) -> dict[str, Any]:
    """Return byte sequences by rank as the metadata of a GGUF file."""
    if architecture != LLAMA3_ARCHITECTURE:
        raise ConfigError(f"how texts are cut into words before is known of {LLAMA3_ARCHITECTURE} alone")
    spelled = {byte: letter for letter, byte in BYTE_OF.items()}
    tokens = list[str]()
    for number, line in enumerate(content.splitlines()):
        try:
            coded, rank = line.split()
            tokens.append("".join(spelled[byte] for byte in base64.b64decode(coded, validate=True)))
            if int(rank) != number:
                raise ValueError(f"rank {int(rank)}")
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"line {number + 1}: is not a base64 and the rank {number} ({error})") from error
    known = set(tokens)
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [int(TokenType.NORMAL)] * len(tokens),
    }


def _named(metadata: dict[str, Any], tokenizer_config: Mapping[str, object]) -> dict[str, Any]:
    """Put the tokens that tokenizer_config.json adds among the others, and return the keys for those it names."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata.get("tokenizer.ggml.scores", [0.0] * len(tokens))
    for token_id, (content, special) in sorted(_added(tokenizer_config).items()):
        if token_id > len(tokens):
            raise ConfigError(f"added_tokens_decoder: no token has the id {len(tokens)}, and one the id {token_id}")
        kind = int(TokenType.CONTROL if special else TokenType.USER_DEFINED)
        place = slice(token_id, token_id + 1)
        tokens[place], types[place], scores[place] = [content], [kind], [0.0]
    keys: dict[str, Any] = {}
    for key, name in NAMED.items():
        text = content_of(tokenizer_config.get(key))
        if text is None:
            continue
        if text not in tokens:
            raise ConfigError(f"{key}: {text!r} is not among the tokens")
        keys[f"tokenizer.ggml.{name}_token_id"] = tokens.index(text)
    flags = Fields(tokenizer_config)
    for key, default in (("add_bos_token", True), ("add_eos_token", False)):
        keys[f"tokenizer.ggml.{key}"] = flags.flag(key, default=default)
    return keys


def _added(tokenizer_config: Mapping[str, object]) -> dict[int, tuple[str, bool]]:
    """Return text and kind of the tokens in `added_tokens_decoder`; whether it is special says the kind."""
    added: dict[int, tuple[str, bool]] = {}
    given = tokenizer_config.get("added_tokens_decoder", {})
    if not isinstance(given, Mapping):
        raise ConfigError("added_tokens_decoder: is not an object")
    for token_id, token in given.items():
        content = content_of(token)
        if not (token_id.isascii() and token_id.isdecimal()) or content is None or not isinstance(token, Mapping):
            raise ConfigError(f"added_tokens_decoder: {token_id!r} is not a token id with an object for its content")
        if any(token.get(side) for side in ("lstrip", "rstrip", "single_word")):
            raise ConfigError(f"added_tokens_decoder: {token_id!r} takes spaces around it, which is not supported")
        added[int(token_id)] = content, token.get("special") is True
    return added


def content_of(token: object) -> str | None:
    """Return the text of a token, which is a string or an object with settings."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _prepend_everywhere(backend: tokenizers.Tokenizer, fields: Fields) -> None:
    """Begin each text between special tokens with a word, also one that begins with a space, as sentencepiece does.

    Without this, which is what `legacy: false` means, only what begins the whole text does.
    """
    prepend = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    steps = [normalizers.Prepend(WORD_START)] if prepend else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", WORD_START)])
    backend.pre_tokenizer = None
