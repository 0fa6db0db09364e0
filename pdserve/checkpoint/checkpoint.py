"""What a model's files hold, whichever format they are in, and the form in which a worker keeps the weights."""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import xxhash

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.embedding import GENERATING, Embedding
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.weights import GROUP, Codes, Part, Stored, Weights
from pdserve.protocol.refusal import RefusedError
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import Device, Quantization
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pdserve.model.fp8 import Fp8
    from pdserve.model.groups import Groups

FileCodes = Literal["awq", "compressed-tensors", "fp8", "gguf", "gptq", "mxfp4"]
ChosenQuantization = Literal["none", "int8", "int4"] | FileCodes  # floats, rounded as they are read, or the file's

PART_BYTES = 2**25  # hashed by one thread at a time
READ_BYTES = 2**20  # fits a core's cache
MAX_THREADS = 8
QUANTIZED_DTYPES = ("bfloat16", "float32")  # of the inputs of quantized products, on a CPU
DTYPES_OF_GPU = ("bfloat16", "float16", "float32")
BITS = {"int8": 8, "int4": 4}
VOCABULARY_BITS = 8  # of embedding and head, at least: rounding them to 4 bits costs the most and gains the least
UNROUNDED = (
    ".gate.weight",  # routers of experts: few bytes, and rounding would choose others
    ".router.weight",
    ".router.layer.weight",
    ".router.proj.weight",
    ".shared_expert_gate.weight",
    ".kv_b_proj.weight",  # expands latents: products take its parts in bfloat16
)
EMBEDDING = "model.embed_tokens.weight"
TABLES = (EMBEDDING, "model.embed_tokens_per_layer.weight")  # whose rows are looked up
VOCABULARY = (*TABLES, EMBEDDING.removeprefix("model."), "lm_head.weight")  # heads have the second


def file_digest(path: Path) -> str:
    """Return a digest of the file's bytes, XXH3 over XXH3 digests of its parts; ConfigError if it cannot be read.

    Parts are hashed side by side, in less time than the same bytes take to be loaded.
    """
    try:
        size = path.stat().st_size
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "fingerprint") as threads:
            parts = b"".join(threads.map(_part_digest, repeat(path), range(0, size, PART_BYTES)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return xxhash.xxh3_128_hexdigest(parts + size.to_bytes(8, "little"))


def _part_digest(path: Path, start: int) -> bytes:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = PART_BYTES
        while left and (count := file.readinto(buffer[: min(left, READ_BYTES)])):
            hasher.update(buffer[:count])
            left -= count
    return hasher.digest()


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Put the path in front of any ConfigError raised within."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@contextmanager
def made_by_library(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a tokenizer is made of a file into a ConfigError that names the file."""
    try:
        with naming(path):
            yield
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path}: no tokenizer can be made of it ({error})") from error


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling that the model's publisher recommends; None: no recommendation."""

    max_tokens: int | None = None  # of any answer, as in vLLM
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> "GenerationDefaults":
        """Read a generation_config.json; with do_sample false, decoding is greedy."""
        fields = Fields(config)
        max_tokens, penalty = fields.optional_int("max_new_tokens"), fields.optional_number("repetition_penalty")
        if not fields.flag("do_sample", default=True):
            return cls(max_tokens, temperature=0.0, repetition_penalty=penalty)
        top_k = fields.optional_int("top_k")
        return cls(
            max_tokens,
            temperature=fields.optional_number("temperature"),
            top_k=None if top_k is None else max(0, top_k),  # -1: off
            top_p=fields.optional_number("top_p"),
            min_p=fields.optional_number("min_p"),
            repetition_penalty=penalty,
        )

    def sampling(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def within(self, vocab_size: int) -> "GenerationDefaults":
        """Return them for a vocabulary of this size; ConfigError for a value that no request could have."""
        fitting = self if self.top_k is None else replace(self, top_k=min(self.top_k, vocab_size))
        try:
            SamplingParams(**fitting.sampling()).validate(vocab_size)  # type: ignore[arg-type]
        except RefusedError as error:
            problem = str(error).replace("max_tokens:", "max_new_tokens:", 1)  # as the file has it
            raise ConfigError(f"generation_config.json: {problem}") from error
        return fitting


NO_DEFAULTS = GenerationDefaults()
DEFAULT = "default"  # the name of a model's chat template, where there are several
TOOL_USE = "tool_use"  # the name of a chat template for conversations with tools


@dataclass(frozen=True)
class Checkpoint:
    """A model's files. Small parts are read, weights and tokenizer on demand."""

    path: Path
    name: str
    config: ModelConfig
    raw_config: Mapping[str, object]  # the mapping `config` was read from
    generation: GenerationDefaults
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]  # as chat templates name them: bos_token, eos_token, ...
    chat_template: str | None  # the source
    weight_files: tuple[Path, ...]
    weights: Callable[[], Weights]  # by Hugging Face names; opens the files; imports torch or numpy
    tokenizer: Callable[[], Tokenizer]
    check_weights: Callable[[], None]  # reads their headers; ConfigError names a file that is missing or cut short
    coded_weights: Callable[[], Weights] | None = None  # matrices as the file codes them, if products take its codes
    coded_as: FileCodes | None = None  # what these are
    template_files: Mapping[str, Path] = field(default_factory=dict)  # by the templates' names; others are in `path`
    tool_template: str | None = None  # the source of the chat template for conversations with tools; None: the same
    embedding: Embedding = GENERATING  # how it makes vectors of texts
    coded_in_order: bool = True  # whether coded matrices have their inputs in the order of their groups

    @cached_property
    def fingerprint(self) -> str:
        """Identify config and weights by all of their bytes; ConfigError if a file cannot be read."""
        digest = hashlib.sha256(json.dumps(self.raw_config, sort_keys=True).encode())
        for path in self.weight_files:
            digest.update(f"\n{file_digest(path)}".encode())
        return digest.hexdigest()

    def ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the end-of-sequence tokens that the tokenizer has. A model's files may name others, too."""
        return tuple(token_id for token_id in self.eos_token_ids if 0 <= token_id < tokenizer.vocab_size)

    def chat(self, *, with_tools: bool = False) -> ChatTemplate | None:
        """Compile the chat template, or the one for conversations with tools; None if the model has none."""
        name, source = (TOOL_USE, self.tool_template) if with_tools else (DEFAULT, None)
        if source is None:
            name, source = DEFAULT, self.chat_template
        with naming(self.template_files.get(name, self.path)):
            return None if source is None else ChatTemplate(source, self.special_tokens)


def tokenizer_archive(checkpoint: Checkpoint) -> bytes:
    """Return a model's tokenizer as a zip archive of the files that other programs read."""
    kind = {name: checkpoint.raw_config.get(name) for name in ("architectures", "model_type")}
    config = {
        **{name: value for name, value in kind.items() if value is not None},
        "eos_token_id": list(checkpoint.eos_token_ids),
        "max_position_embeddings": checkpoint.config.max_position_embeddings,
        "vocab_size": checkpoint.config.vocab_size,
    }
    tokenizer_config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **checkpoint.special_tokens}
    if checkpoint.tool_template is not None:
        templates = {"default": checkpoint.chat_template, TOOL_USE: checkpoint.tool_template}
        named = [{"name": name, "template": source} for name, source in templates.items()]
        tokenizer_config["chat_template"] = named
    elif checkpoint.chat_template is not None:
        tokenizer_config["chat_template"] = checkpoint.chat_template
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokenizer.json", checkpoint.tokenizer().to_json())
        archive.writestr("tokenizer_config.json", json.dumps(tokenizer_config))
        archive.writestr("config.json", json.dumps(config))
    return file.getvalue()


def choose_quantization(asked: Quantization, checkpoint: Checkpoint, dtype: str, device: Device) -> ChosenQuantization:
    """Return the form of a model's matrices; ConfigError if the one asked for is not possible.

    auto keeps the codes of a file unless inputs are float32: who asks for that wants exact products.
    """
    on_gpu = device in ("cuda", "interpreter")
    served: tuple[str, ...] = DTYPES_OF_GPU if on_gpu else QUANTIZED_DTYPES
    takes_order = checkpoint.coded_in_order or (on_gpu and not checkpoint.config.design.mixtures)
    coded_as = checkpoint.coded_as if takes_order else None
    if asked == "auto":
        keeps = dtype in served and dtype != "float32"
        return coded_as if keeps and coded_as is not None else "none"
    if asked == "none":
        return "none"
    if asked == "fp8" and not on_gpu:
        served = ("bfloat16",)  # products widen it to that
    if dtype not in served:
        raise ConfigError(f"quantization: {asked} goes with dtype {' or '.join(served)}, not {dtype}")
    if asked in get_args(FileCodes) and asked != coded_as:
        raise ConfigError(f"quantization: {asked}: {checkpoint.path} has no weights in such codes that products take")
    return asked


def weights_in_form(checkpoint: Checkpoint, quantization: ChosenQuantization, device: Device = "cpu") -> Weights:
    if quantization == checkpoint.coded_as and checkpoint.coded_weights is not None:
        return checkpoint.coded_weights()
    weights = checkpoint.weights()
    rounded = in_form(weights, quantization)
    if device == "cuda":  # tables are held as floats there, so rounding them would gain nothing
        rounded.update({name: weights[name] for name in TABLES if name in weights})
    return rounded


def in_form(weights: Weights, quantization: ChosenQuantization) -> dict[str, Stored]:
    """Round matrices of floats as they are read, if asked for. Those whose inputs do not make whole groups stay."""
    return {name: _rounded(name, stored, bits_of(name, stored, quantization)) for name, stored in weights.items()}


def bits_of(name: str, stored: Stored, quantization: ChosenQuantization) -> int | None:
    """Return the bits to which a tensor of floats is rounded; None: it stays as it is."""
    if quantization not in BITS or len(stored.shape) != 2 or stored.shape[1] % GROUP or name.endswith(UNROUNDED):
        return None
    return max(BITS[quantization], VOCABULARY_BITS) if name in VOCABULARY else BITS[quantization]


def _rounded(name: str, stored: Stored, bits: int | None) -> Stored:
    if bits is None:
        return stored
    import numpy as np  # noqa: PLC0415 - routers open checkpoints without it

    from pdserve.model.fp8 import Fp8  # noqa: PLC0415
    from pdserve.model.groups import Groups, quantized  # noqa: PLC0415

    def read(part: Part) -> "Groups | Fp8":
        values = stored.read(part)
        if isinstance(values, Groups | Fp8):
            return values
        try:
            return quantized(values if isinstance(values, np.ndarray) else values.float().numpy(), bits)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error

    return Stored(stored.shape, read, GROUP, Codes(bits, GROUP))
