"""The shards of all ranks, put together, are the whole, in each format of a checkpoint; a shard reads its own bytes.

Shards of a matrix are taken from its source alone, and by a model that is built for a rank.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from held_weights import held, read_all
from hypothesis import given
from hypothesis import strategies as st
from mapped_files import mapped_kb
from safetensors.torch import save_file
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import in_form, weights_in_form
from pdserve.checkpoint.gguf_family import LAYER_NAMES, TOP_NAMES
from pdserve.checkpoint.hf_directory import read_weights
from pdserve.checkpoint.open import open_checkpoint
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.family import Tensors
from pdserve.model.groups import Groups
from pdserve.model.layers import Layer
from pdserve.model.loading import dummy_weights
from pdserve.model.mlp import GatedMlp
from pdserve.model.ops import Dense, Linear, TorchOps
from pdserve.model.parallel import RowParallel, VocabParallel
from pdserve.model.weights import COLUMNS, ROWS, Rank, Shard, Weights

WriteGguf = Callable[..., Path]

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 8, 4, 16, 128, 192, 50
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "attention_bias": True,
    "mlp_bias": True,
}
GGUF_METADATA = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def as_gguf(name: str) -> str:
    named = {theirs: ours for ours, theirs in {**TOP_NAMES, **LAYER_NAMES}.items()}
    part, kind = name.rsplit(".", 1)
    if part in named:
        return f"{named[part]}.{kind}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{named[rest]}.{kind}"


@pytest.fixture(params=["safetensors", "float32", "float16", "Q8_0", "Q4_1", "decoded Q4_1", "int8", "int4"])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, write_gguf: WriteGguf, tokenizer_keys: dict[str, object]
) -> tuple[ModelConfig, Weights]:
    """Write the same tensors in a format; return what a worker reads of it."""
    source, config = request.param, ModelConfig.from_hf(CONFIG)
    tensors = read_all(dummy_weights(config))
    if source in ("safetensors", "int8", "int4"):
        save_file(tensors, tmp_path / "model.safetensors")
        weights = read_weights(tmp_path)
        return config, weights if source == "safetensors" else in_form(weights, source)
    arrays = {as_gguf(name): tensor.numpy() for name, tensor in tensors.items()}
    coded = {}
    if (kind := source.split()[-1]) in Kind.__members__:
        coded = {name: (arrays.pop(name), Kind[kind]) for name in list(arrays) if arrays[name].ndim == 2}
    if source == "float16":
        arrays = {name: values.astype(np.float16) for name, values in arrays.items()}
    metadata = {f"llama.{key}": value for key, value in GGUF_METADATA.items()}
    checkpoint = open_checkpoint(write_gguf("llama", metadata | tokenizer_keys, arrays, coded))
    return checkpoint.config, weights_in_form(checkpoint, "gguf" if source in Kind.__members__ else "none")


def parts(read: object) -> tuple[Tensor, ...]:
    """Return the tensors that a tensor consists of."""
    if isinstance(read, Groups):
        return tuple(torch.tensor(part) for part in (read.codes, read.scales, read.minimums))
    return (read if isinstance(read, Tensor) else torch.from_numpy(read),)


def cat(shards: list[object], axis: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat(same, axis) for same in zip(*map(parts, shards), strict=True))


def shards_of(axis: int, size: int) -> list[Shard]:
    return [Shard(axis, rank, size, unit=32 if axis == COLUMNS else 2) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_each_tensor_make_the_whole(opened: tuple[ModelConfig, Weights], size: int) -> None:
    _, weights = opened
    for name, stored in weights.items():
        whole = parts(stored.read(()))
        for axis in range(len(stored.shape)):
            shards = [stored.read(shard.part(name, stored)) for shard in shards_of(axis, size)]
            for ours, expected in zip(cat(shards, axis), whole, strict=True):
                assert torch.equal(ours, expected), (name, axis)


def built(opened: tuple[ModelConfig, Weights], rank: Rank) -> Decoder:
    config, weights = opened
    tensors = Tensors(weights, torch.float32, torch.device("cpu"))
    return Decoder.build(config, tensors, TorchOps(), rank)


def matrix(weight: Linear) -> Dense:
    if isinstance(weight, RowParallel | VocabParallel):
        weight = weight.weight
    assert isinstance(weight, Dense)
    return weight


def values(weight: Linear) -> Tensor:
    """Return a matrix with its bias as one more column."""
    held = matrix(weight)
    assert held.bias is not None
    return torch.cat((held.data, held.bias[:, None]), 1)


def by_columns(weights: list[Linear]) -> Tensor:
    first, *others = map(matrix, weights)
    assert all(other.bias is None for other in others), "ranks add their products: only one may add the bias"
    assert first.bias is not None
    return torch.cat((first.data, *(other.data for other in others), first.bias[:, None]), 1)


def by_rows(weights: list[Linear], widths: tuple[int, ...]) -> Tensor:
    """Put together matrices in which several were joined, with rows in proportion to `widths`."""
    split = [
        values(weight).split([len(values(weight)) * width // sum(widths) for width in widths]) for weight in weights
    ]
    return torch.cat([torch.cat(same) for same in zip(*split, strict=True)])


def mlp_of(layer: Layer) -> GatedMlp:
    assert isinstance(layer.mlp, GatedMlp)
    return layer.mlp


@pytest.mark.parametrize("size", [2, 3])
def test_models_built_for_each_rank_make_the_whole_model(opened: tuple[ModelConfig, Weights], size: int) -> None:
    whole, ranks = built(opened, Rank()), [built(opened, Rank(index, size)) for index in range(size)]
    for index, layer in enumerate(whole.layers):
        of_ranks = [rank.layers[index] for rank in ranks]
        mlps = [mlp_of(each) for each in of_ranks]
        assert torch.equal(
            by_rows([each.attention.qkv for each in of_ranks], (HEADS // KV_HEADS, 1, 1)), values(layer.attention.qkv)
        )
        assert torch.equal(by_columns([each.attention.o for each in of_ranks]), values(layer.attention.o))
        assert torch.equal(by_rows([mlp.gate_up for mlp in mlps], (1, 1)), values(mlp_of(layer).gate_up))
        assert torch.equal(by_columns([mlp.down for mlp in mlps]), values(mlp_of(layer).down))
    assert torch.equal(torch.cat([matrix(rank.lm_head).data for rank in ranks]), matrix(whole.lm_head).data)
    assert torch.equal(torch.cat([matrix(rank.embedding).data for rank in ranks]), matrix(whole.embedding).data)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 64), st.sampled_from([ROWS, COLUMNS]))
def test_spans_divide_an_axis_and_differ_by_a_unit_at_most(size: int, units: int, unit: int, axis: int) -> None:
    (stored,) = held({"w": torch.empty((7, units * unit) if axis == COLUMNS else (units * unit, 7))}).values()
    if units < size:
        with pytest.raises(
            ConfigError, match=f"^w: {units * unit} in units of {unit} cannot be split over {size} ranks"
        ):
            Shard(axis, 0, size, unit).part("w", stored)
        return
    spans = [Shard(axis, rank, size, unit).part("w", stored)[axis] for rank in range(size)]
    assert [place for span in spans for place in range(span.start, span.stop)] == list(range(units * unit))
    lengths = {(span.stop - span.start) // unit for span in spans}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("form", ["int8", "Q8_0"])
def test_inputs_that_make_no_whole_groups_are_refused_by_name_and_sizes(
    form: str, write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    if form == "int8":
        weights = in_form(held({"w": torch.ones(2, 96)}), "int8")
    else:
        metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
        coded = {"token_embd.weight": (np.ones((4, 96), np.float32), Kind.Q8_0)}
        checkpoint = open_checkpoint(write_gguf("llama", metadata, {}, coded))
        weights = weights_in_form(checkpoint, "gguf")
    ((name, stored),) = weights.items()
    complaint = rf"{name}: inputs 0 to 48 of 96 are not whole groups of 32, for rank 0 of 2"
    with pytest.raises(ConfigError, match=complaint):
        Shard(COLUMNS, 0, 2).part(name, stored)
    assert Shard(COLUMNS, 2, 3).part(name, stored) == (slice(None), slice(64, 96))


def test_a_shard_reads_no_bytes_but_its_own(
    tmp_path: Path, write_gguf: WriteGguf, tokenizer_keys: dict[str, object]
) -> None:
    shard, slack_kb = Shard(ROWS, 5, 16), 2 * 2048 + 256  # the kernel maps what is around, in pages of up to 2 MiB
    (tmp_path / "model").mkdir()
    values = torch.zeros(4096, 2048)
    save_file({"w": values}, tmp_path / "model" / "model.safetensors")
    metadata = {f"llama.{key}": value for key, value in GGUF_METADATA.items()}
    of_gguf = write_gguf("llama", metadata | tokenizer_keys, {"token_embd.weight": values.numpy()})
    for path, weights in (
        (tmp_path / "model" / "model.safetensors", read_weights(tmp_path / "model")),
        (of_gguf, open_checkpoint(of_gguf).weights()),
    ):
        (stored,) = weights.values()
        before_kb, shard_kb = mapped_kb(path), values.nbytes // 16 // 1024
        assert torch.as_tensor(stored.read(shard.part("w", stored))).sum() == 0.0  # touches all of it
        assert shard_kb <= mapped_kb(path) - before_kb <= shard_kb + slack_kb
        assert torch.as_tensor(stored.read(())).sum() == 0.0
        assert mapped_kb(path) - before_kb > 15 * shard_kb, "so this would have been seen"
