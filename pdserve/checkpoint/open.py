"""Open a model on disk: a Hugging Face directory, or a GGUF file."""

from functools import partial
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.checkpoint import hf_directory
from pdserve.checkpoint.checkpoint import TOOL_USE, Checkpoint, GenerationDefaults, made_by_library, naming
from pdserve.checkpoint.embedding import of_gguf
from pdserve.checkpoint.gguf_config import hf_config
from pdserve.checkpoint.gguf_file import GgufFile, read_gguf
from pdserve.checkpoint.gguf_tokenizer import build_tokenizer
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.weights import Weights
from pdserve.text.tokenizer import Tokenizer

NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_KEYS = ("eos", "eot", "eom")
END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")  # some files name only the end-of-document token


def open_gguf(path: Path) -> Checkpoint:
    """Read the header of a GGUF file; weights and tokenizer are made on demand."""
    file = read_gguf(path)
    raw_config = hf_config(file)
    config = ModelConfig.from_hf(raw_config)
    fields = Fields(file.metadata)
    tokens = fields.texts("tokenizer.ggml.tokens")
    named = {name: _token_id(fields, key, len(tokens)) for name, key in NAMED_TOKENS.items()}
    is_quantized = any(tensor.is_quantized for tensor in file.tensors)
    return Checkpoint(
        path=path,
        name=path.stem,
        config=config,
        raw_config=raw_config,
        generation=GenerationDefaults(),
        embedding=of_gguf(fields.optional_int(f"{fields.text('general.architecture')}.pooling_type")),
        eos_token_ids=_end_tokens(fields, tokens),
        special_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        chat_template=fields.text("tokenizer.chat_template", "") or None,
        tool_template=fields.text(f"tokenizer.chat_template.{TOOL_USE}", "") or None,
        weight_files=(path,),
        weights=partial(_weights, file, config),
        tokenizer=partial(_tokenizer, file, named["bos_token"]),
        check_weights=partial(_check_weights, file),
        coded_weights=partial(_weights, file, config, keep_coded=True) if is_quantized else None,
        coded_as="gguf" if is_quantized else None,
    )


def _weights(file: GgufFile, config: ModelConfig, *, keep_coded: bool = False) -> Weights:
    from pdserve.checkpoint.gguf_weights import read_weights  # noqa: PLC0415 - routers open checkpoints without numpy

    with naming(file.path):
        return read_weights(file, config, keep_coded=keep_coded)


def _check_weights(file: GgufFile) -> None:
    from pdserve.checkpoint.gguf_weights import check_sizes  # noqa: PLC0415 - as above

    with naming(file.path):
        check_sizes(file)


def _tokenizer(file: GgufFile, bos_token_id: int | None) -> Tokenizer:
    with made_by_library(file.path):
        return Tokenizer(build_tokenizer(file.metadata), bos_token_id)


def _token_id(fields: Fields, key: str, num_tokens: int) -> int | None:
    token_id = fields.optional_int(f"tokenizer.ggml.{key}_token_id")
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise ConfigError(f"tokenizer.ggml.{key}_token_id: {token_id} is not among the {num_tokens} tokens")
    return token_id


def _end_tokens(fields: Fields, tokens: tuple[str, ...]) -> tuple[int, ...]:
    ids = [_token_id(fields, key, len(tokens)) for key in END_KEYS]
    ids += [tokens.index(token) for token in END_OF_TURN if token in tokens]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config and metadata of a Hugging Face directory, a .gguf file, or a directory holding exactly one.

    Needs neither torch nor numpy. Raises ConfigError naming the path and the key at fault.
    """
    try:
        with naming(path):
            return _open(path.expanduser())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def check_model(path: Path, *, with_weights: bool = True) -> Checkpoint:
    """Open a model, make its tokenizer and its chat templates, and read the headers of its weights.

    Raises ConfigError for whatever a process that serves the model would refuse in its files.
    """
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    with naming(checkpoint.path):
        checkpoint.generation.within(min(tokenizer.vocab_size, checkpoint.config.vocab_size))
    for with_tools in (False, True):
        checkpoint.chat(with_tools=with_tools)
    if with_weights:
        checkpoint.check_weights()
    return checkpoint


def _open(path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError("is neither a directory nor a .gguf file")
        return open_gguf(path)
    if not path.is_dir():
        raise ConfigError("there is no such file or directory")
    if (path / "config.json").exists():
        return hf_directory.open_directory(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"holds {len(files)} GGUF files ({names}); name one of them")
    raise ConfigError("holds neither a config.json nor a .gguf file")
