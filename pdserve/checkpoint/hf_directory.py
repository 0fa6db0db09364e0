"""Open a model in a Hugging Face directory."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import DEFAULT, TOOL_USE, Checkpoint, GenerationDefaults, made_by_library, naming
from pdserve.checkpoint.embedding import read_embedding
from pdserve.checkpoint.hub import repository_of
from pdserve.checkpoint.published import decoding, read_format
from pdserve.checkpoint.vocabulary_file import content_of, read_vocabulary
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.stacked import apart
from pdserve.model.weights import Part, Stored, Weights
from pdserve.model.wrappers import text_tensors
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST_OF_BODY = "embed_tokens.weight"
USUAL = {  # what names of tensors become that begin as Nemotron-H's do
    "backbone.embeddings.": "model.embed_tokens.",
    "model.embeddings.": "model.embed_tokens.",
    "backbone.": "model.",
}
PICKLED = ("*.bin", "*.pt", "*.pth")
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def open_directory(path: Path) -> Checkpoint:
    """Read the JSON files; weights and tokenizer are read on demand."""
    raw_config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json")
    tokenizer_config = read_json(path / "tokenizer_config.json")
    with naming("config.json"):
        config = ModelConfig.from_hf(raw_config)
    with naming("generation_config.json"):
        defaults = GenerationDefaults.from_hf(generation)
    with naming("config.json"):
        form = read_format(raw_config)

    def weights(*, keep_coded: bool = False) -> Weights:
        read = decoding(text_tensors(whole(read_weights(path)), raw_config), form, keep_coded=keep_coded)
        return apart(read, config, keep_coded=keep_coded)

    embedding = read_embedding(lambda name: _parsed(path / name), config.hidden_size)
    special_tokens, templates = _special_tokens(tokenizer_config), _chat_templates(path, tokenizer_config)
    return Checkpoint(
        path=path,
        name=repository_of(path) or path.resolve().name,
        config=config,
        raw_config=raw_config,
        generation=defaults,
        embedding=embedding,
        eos_token_ids=_end_tokens(generation, tokenizer_config, config),
        special_tokens=special_tokens,
        chat_template=templates.get(DEFAULT, (path, None))[1],
        tool_template=templates.get(TOOL_USE, (path, None))[1],
        template_files={name: file for name, (file, _) in templates.items()},
        weight_files=weight_files(path),
        weights=weights,
        coded_weights=partial(weights, keep_coded=True) if form.coded_as else None,
        coded_as=form.coded_as,
        coded_in_order=form.in_order,
        tokenizer=partial(_tokenizer, path, tokenizer_config, config.architecture),
        check_weights=partial(check_weights, path),
    )


def read_json(path: Path) -> dict[str, object]:
    """Return a JSON object; an empty one if there is no such file."""
    content = _parsed(path, {})
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name}: is not a JSON object")
    return content


def _parsed(path: Path, default: object = None) -> object:
    """Return what a JSON file has; `default` if there is no such file."""
    text = _read_text(path)
    if text is None:
        return default
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name}: is no JSON ({error})") from error


def _read_text(path: Path) -> str | None:
    """Return a file's text; None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ConfigError(f"{path.name}: is a link to a file that does not exist") from error
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: is not UTF-8 ({error})") from error
    except OSError as error:
        raise ConfigError(f"{path.name}: cannot be read ({error.strerror})") from error


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files that exist; none for a directory with only a config."""
    files = [file for file in _named_files(path) if file.is_file()]
    pickled = [file.name for pattern in PICKLED for file in sorted(path.glob(pattern))]
    if pickled and not files:
        raise ConfigError(f"holds weights only as {pickled[0]}; pickles run code: convert it to safetensors")
    return tuple(files)


def _named_files(path: Path) -> list[Path]:
    """Return the files that the index names, or the single file if there is no index."""
    if not _has_index(path):
        return [path / SINGLE_FILE]
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise ConfigError(f"{INDEX}: not an index of safetensors files")
    for name in weight_map.values():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ConfigError(f"{INDEX}: {name!r} is not the name of a file beside it")
    return [path / name for name in sorted(set(weight_map.values()))]


def _has_index(path: Path) -> bool:
    return (path / INDEX).exists() or (path / INDEX).is_symlink()


def whole(weights: Weights) -> Weights:
    """Return tensors by the names of a whole model. Embedding models are often saved without their head's part."""
    if FIRST_OF_BODY in weights:
        return {name if name.startswith("lm_head.") else f"model.{name}": stored for name, stored in weights.items()}
    return {_usual(name): stored for name, stored in weights.items()}


def _usual(name: str) -> str:
    old = next((each for each in USUAL if name.startswith(each)), "")
    return USUAL.get(old, "") + name.removeprefix(old)


class _Slice(Protocol):
    """A tensor of an open file."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, part: Part) -> "torch.Tensor":
        """Return a view of the mapped file: other parts are not read."""
        ...


def read_weights(path: Path) -> Weights:
    """Return the directory's tensors, not read yet; ConfigError names a file that is missing or broken."""
    weights = dict[str, Stored]()
    for file in _named_files(path):
        opened = _opened(file, "pt")
        for name in opened.keys():  # noqa: SIM118  safe_open is no mapping
            if name in weights:
                raise ConfigError(f"{file}: {name}: given twice")
            tensor: _Slice = opened.get_slice(name)
            weights[name] = Stored(tuple(tensor.get_shape()), partial(_read_tensor, file, tensor))
    return weights


def _read_tensor(file: Path, tensor: _Slice, part: Part) -> "torch.Tensor":
    with _reading(file):
        return tensor[part]


def check_weights(path: Path) -> None:
    """Read the headers of all files with weights; ConfigError names one that is missing, broken or cut short."""
    with naming(path):
        files = _named_files(path)
    for file in files:
        _opened(file, "numpy")


def _opened(file: Path, framework: str) -> Any:  # noqa: ANN401 - `safe_open` is not typed
    """Map a file and read its header. The file is closed once nothing refers to what is returned."""
    from safetensors import safe_open  # noqa: PLC0415 - routers open checkpoints without it

    if not file.is_file():
        problem = (
            f"{file}: missing" if _has_index(file.parent) else f"{file.parent}: holds neither {SINGLE_FILE} nor {INDEX}"
        )
        raise ConfigError(problem)
    with _reading(file):
        return safe_open(file, framework=framework)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError  # noqa: PLC0415 - as above

    try:
        yield
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
        found = [token_id for token_id, token in added.items() if content_of(token) == named]
        if wrong := [token_id for token_id in found if not (token_id.isascii() and token_id.isdecimal())]:
            raise ConfigError(f"tokenizer_config.json: added_tokens_decoder: {wrong[0]!r} is not a token id")
        ends += tuple(map(int, found))
    return tuple(dict.fromkeys(ends))


def _special_tokens(tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    contents = {name: content_of(tokenizer_config.get(name)) for name in NAMED_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _chat_templates(path: Path, tokenizer_config: Mapping[str, object]) -> dict[str, tuple[Path, str]]:
    """Return chat templates and their files by name, as transformers does: from files of their own, else the config."""
    file = path / "chat_template.jinja"
    default = _read_text(file)
    if default is not None:
        others = ((each.stem, each) for each in (path / "additional_chat_templates").glob("*.jinja"))
        read = {name: (each, _read_text(each)) for name, each in others} | {DEFAULT: (file, default)}
        if empty := [each.name for each, source in read.values() if not source]:
            raise ConfigError(f"{empty[0]}: is empty")
        return {name: (each, source) for name, (each, source) in read.items() if source is not None}
    given = tokenizer_config.get("chat_template")
    listed = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}] if given is not None else []
    sources: dict[str, tuple[Path, str]] = {}
    for each in listed:
        name, source = (each.get("name"), each.get("template")) if isinstance(each, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            problem = "is neither a string nor a list of objects with the strings name and template"
            raise ConfigError(f"tokenizer_config.json: chat_template: {problem}")
        sources[name] = path / "tokenizer_config.json", source
    return sources


def _tokenizer(path: Path, tokenizer_config: Mapping[str, object], architecture: str) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        with made_by_library(path):
            return Tokenizer(*read_vocabulary(path, tokenizer_config, architecture))
    bos = _special_tokens(tokenizer_config).get("bos_token")
    with made_by_library(file):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        return Tokenizer(backend, backend.token_to_id(bos) if bos is not None else None)
