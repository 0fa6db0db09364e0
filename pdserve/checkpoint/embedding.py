"""How a model makes a vector of a text, as files of sentence-transformers beside its config say.

`modules.json` lists what a text goes through: the model, a pooling, and perhaps a division by the vector's length. A
model without that file is one that generates: its vector is the last token's, of length 1, as in vLLM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdserve.base.errors import ConfigError
from pdserve.model.fields import Fields
from pdserve.protocol.pooling import Kind, Pooling

MODULES = "modules.json"
MODES: Mapping[str, Kind] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODE = "pooling_mode"  # begins the names of all modes
ReadJson = Callable[[str], object]  # of a file in the model's directory; None where there is none


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of a text."""

    pooling: Pooling = Pooling("last", normalizes=True)  # noqa: RUF009 - it is a value
    max_tokens: int | None = None  # of a text, with the tokenizer's own; None: as many as the model takes
    refusal: str = ""  # why no vectors are made; the model may be served all the same


GENERATING = Embedding()


def read_embedding(read: ReadJson, hidden_size: int) -> Embedding:
    """Return what the files of a directory say. What is not served is a refusal that names file and key."""
    listed = read(MODULES)
    if listed is None:
        return GENERATING
    try:
        return _read(listed, read, hidden_size)
    except ConfigError as error:
        return Embedding(refusal=str(error))


def _read(listed: object, read: ReadJson, hidden_size: int) -> Embedding:
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        raise ConfigError(f"{MODULES}: is not a list of modules")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ConfigError(f"{MODULES}: {', '.join(kinds)} are not served: Transformer, Pooling and Normalize are")
    return Embedding(
        Pooling(_kind(read, f"{listed[1].get('path', '')}/config.json", hidden_size), normalizes=len(kinds) > 2),
        _max_tokens(read),
    )


def of_gguf(pooling: int | None) -> Embedding:
    """Return what `pooling_type` of a GGUF file says; vectors have length 1, as llama.cpp's server makes them."""
    match pooling:
        case None | 0 | 3:  # none, which the files of models that generate may say, and the last token
            return GENERATING
        case 1:
            return Embedding(Pooling("mean", normalizes=True))
        case _:
            return Embedding(refusal=f"pooling_type: {pooling} is not served: 1 (mean) and 3 (last) are")


def _kind(read: ReadJson, path: str, hidden_size: int) -> Kind:
    given = read(path)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: missing, and {MODULES} names it")
    if (mode := given.get(_MODE)) is not None:  # as version 5 writes it
        given = {**given, f"{_MODE}_{mode}" if mode != "mean" else "pooling_mode_mean_tokens": True}
    modes = [key for key, value in given.items() if key.startswith(f"{_MODE}_") and value is True]
    if len(modes) != 1 or modes[0] not in MODES:
        raise ConfigError(f"{path}: {', '.join(modes) or _MODE}: is not served: one of {', '.join(MODES)} is")
    fields = Fields(given)
    if fields.integer("word_embedding_dimension", given.get("embedding_dimension", hidden_size)) != hidden_size:
        raise ConfigError(f"{path}: word_embedding_dimension: is not the model's hidden_size {hidden_size}")
    if not fields.flag("include_prompt", default=True):
        raise ConfigError(f"{path}: include_prompt: false is not served")
    return MODES[modes[0]]


def _max_tokens(read: ReadJson) -> int | None:
    path = "sentence_bert_config.json"
    given = read(path)
    fields = Fields(given if isinstance(given, Mapping) else {})
    if fields.flag("do_lower_case", default=False):
        raise ConfigError(f"{path}: do_lower_case: true is not served")
    return None if fields.optional_int("max_seq_length") is None else fields.positive("max_seq_length")
