"""Open a model in a Hugging Face directory."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from pdserve.checkpoint.checkpoint import TOOL_USE, Checkpoint, GenerationDefaults, naming
from pdserve.checkpoint.fetch import repository_of
from pdserve.errors import ConfigError
from pdserve.model.config import Fields, ModelConfig
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def open_directory(path: Path) -> Checkpoint:
    """Read the JSON files; weights and tokenizer are read on demand."""
    raw_config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    config = ModelConfig.from_hf(raw_config)
    special_tokens, templates = _special_tokens(tokenizer_config), _chat_templates(path, tokenizer_config)
    return Checkpoint(
        path=path,
        name=repository_of(path) or path.resolve().name,
        config=config,
        raw_config=raw_config,
        generation=GenerationDefaults.from_hf(generation),
        eos_token_ids=_end_tokens(generation, tokenizer_config, config),
        special_tokens=special_tokens,
        chat_template=templates.get("default"),
        tool_template=templates.get(TOOL_USE),
        weight_files=_weight_files(path),
        weights=partial(read_weights, path),
        tokenizer=partial(_tokenizer, path, special_tokens),
    )


def _read_json(path: Path) -> dict[str, object]:
    """Return a JSON object; an empty one if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name}: is not a JSON object")
    return content


def _weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files that exist; none for a directory with only a config."""
    files = [file for file in _named_files(path) if file.is_file()]
    pickled = [file.name for pattern in PICKLED for file in sorted(path.glob(pattern))]
    if pickled and not files:
        raise ConfigError(f"holds weights only as {pickled[0]}; pickles run code: convert it to safetensors")
    return tuple(files)


def _named_files(path: Path) -> list[Path]:
    """Return the files that the index names, or the single file if there is no index."""
    if not (path / INDEX).is_file():
        return [path / SINGLE_FILE]
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ConfigError(f"{INDEX}: not an index of safetensors files")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{INDEX}: {name!r} is not the name of a file beside it")
    return [path / name for name in sorted(set(weight_map.values()))]


def read_weights(path: Path) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor of the directory, one at a time; ConfigError names a file that is missing or broken."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - routers open checkpoints without it

    for file in _named_files(path):
        if not file.is_file():
            is_named = (path / INDEX).is_file()
            raise ConfigError(f"{file}: missing" if is_named else f"{path}: holds neither {SINGLE_FILE} nor {INDEX}")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  safe_open is no mapping
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read as safetensors ({error})") from error


def _end_tokens(
    generation: Mapping[str, object], tokenizer_config: Mapping[str, object], config: ModelConfig
) -> tuple[int, ...]:
    """Return the tokens that end an answer: the generation config's, else the config's; and the tokenizer's."""
    ends = Fields(generation).token_ids("eos_token_id") or config.eos_token_ids
    added = tokenizer_config.get("added_tokens_decoder")
    named = _special_tokens(tokenizer_config).get("eos_token")
    if isinstance(added, Mapping) and named is not None:
        ends += tuple(int(token_id) for token_id, token in added.items() if _content(token) == named)
    return tuple(dict.fromkeys(ends))


def _special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    contents = {name: _content(tokenizer_config.get(name)) for name in NAMED_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _content(token: object) -> str | None:
    """Return the text of a token, which is a string or an object with settings."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _chat_templates(path: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Return chat templates by name, as transformers does: from files of their own, else from the config."""
    file = path / "chat_template.jinja"
    if file.exists():
        files = {each.stem: each for each in (path / "additional_chat_templates").glob("*.jinja")} | {"default": file}
        return {name: each.read_text(encoding="utf-8") for name, each in files.items()}
    given = tokenizer_config.get("chat_template")
    listed = given if isinstance(given, list) else [{"name": "default", "template": given}]
    named = [(each.get("name"), each.get("template")) for each in listed if isinstance(each, Mapping)]
    return {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}


def _tokenizer(path: Path, special_tokens: Mapping[str, str]) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise ConfigError(f"{path}: holds no tokenizer.json; save it with a fast tokenizer of transformers")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{file}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    bos = special_tokens.get("bos_token")
    with naming(file):
        return Tokenizer(backend, backend.token_to_id(bos) if bos is not None else None)
