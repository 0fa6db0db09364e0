"""Model files for the checkpoint tests: SmolLM2 from the catalog, and tiny GGUF files written on the spot."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.gguf_file import read_gguf
from pdserve.checkpoint.open import open_checkpoint

Tensors = Mapping[str, npt.NDArray[np.float32]]
Coded = Mapping[str, tuple[npt.NDArray[np.float32], gguf.GGMLQuantizationType]]
WriteGguf = Callable[..., Path]

TINY_MODEL: dict[str, object] = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> Checkpoint:
    return open_checkpoint(smollm2_file)


@pytest.fixture(scope="session")
def smollm2_two_layers(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 cut down to its first two layers, tensors coded as they were."""
    whole = read_gguf(smollm2_file)
    data = np.memmap(smollm2_file, np.uint8, mode="r")
    path = tmp_path_factory.mktemp("smollm2") / "two-layers.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in whole.metadata.items():
        if key.startswith("llama.") and isinstance(value, int):
            writer.add_uint32(key, 2 if key == "llama.block_count" else value)
        elif key.startswith("llama.") and isinstance(value, float):
            writer.add_float32(key, value)
    for tensor in whole.tensors:
        if not tensor.name.startswith("blk.") or tensor.name.startswith(("blk.0.", "blk.1.")):
            kind = gguf.GGMLQuantizationType(tensor.kind)
            byte_shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
            coded = data[tensor.offset_bytes :][: math.prod(byte_shape)].reshape(byte_shape)
            writer.add_tensor(tensor.name, coded, raw_dtype=kind)
    return _finish(writer, path)


@pytest.fixture
def tiny_model() -> dict[str, object]:
    """The figures of a tiny model, without the architecture's prefix."""
    return dict(TINY_MODEL)


@pytest.fixture
def tokenizer_keys() -> dict[str, object]:
    """The metadata of the smallest tokenizer that opens."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Return a function that writes a GGUF file of an architecture: metadata, tensors, and some to quantize."""

    def write(architecture: str, metadata: Mapping[str, object], tensors: Tensors, coded: Coded | None = None) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        for key, value in metadata.items():
            add.get(type(value), writer.add_array)(key, value)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        for name, (values, kind) in (coded or {}).items():
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        return _finish(writer, path)

    return write


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def embedding() -> Tensors:
    """Return the one tensor a file needs to be opened."""
    return {"token_embd.weight": np.zeros((4, 32), np.float32)}
