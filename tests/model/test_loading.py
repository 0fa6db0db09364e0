from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pdserve.checkpoint.hf_directory import read_weights
from pdserve.errors import ConfigError
from pdserve.model.config import ARCHITECTURES, ModelConfig
from pdserve.model.loading import FAMILIES, dummy_weights, load_model

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
)
Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


def load(weights: Iterator[tuple[str, Tensor]]) -> None:
    load_model(CONFIG, weights, torch.float32)


def test_each_architecture_that_a_config_may_name_has_a_family() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{Q_BIAS}: missing"):
        load((name, weight) for name, weight in dummy_weights(CONFIG) if name != Q_BIAS)


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight, .* and 24 more: missing"):
        load(iter([]))


def test_an_unexpected_tensor_is_named() -> None:
    extra = ("model.layers.2.self_attn.q_proj.weight", torch.zeros(16, 16))
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight: not a tensor of"):
        load(iter([*dummy_weights(CONFIG), extra]))


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    with pytest.raises(ConfigError, match=rf"{Q_BIAS}: shape \(2, 16\), the config asks for \(16,\)"):
        load((n, torch.zeros(2, 16) if n == Q_BIAS else w) for n, w in dummy_weights(CONFIG))


def test_a_tensor_given_twice_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight: given twice"):
        load(iter([*dummy_weights(CONFIG), next(dummy_weights(CONFIG))]))


def test_tensors_the_model_does_not_read_are_passed_over() -> None:
    tied = replace(CONFIG, tie_word_embeddings=True)
    ignored = [("lm_head.weight", torch.zeros(1)), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(1))]
    load_model(tied, iter([*dummy_weights(tied), *ignored]), torch.float32)


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    load_model(CONFIG, dummy_weights(CONFIG), torch.float32, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_arrays_load_like_tensors_and_dtypes_are_converted() -> None:
    arrays = ((name, np.asarray(weight)) for name, weight in dummy_weights(CONFIG))
    model = load_model(CONFIG, arrays, torch.bfloat16)
    _, expected = next(dummy_weights(CONFIG))
    assert torch.equal(model.ops.embed(torch.arange(len(expected)), model.embedding), expected.bfloat16())


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (dict(dummy_weights(CONFIG, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[Q_BIAS], other[Q_BIAS])


def test_a_checkpoint_in_several_files_is_read_through_its_index(tmp_path: Path) -> None:
    weights = dict(dummy_weights(CONFIG))
    names = list(weights)
    save_file({name: weights[name] for name in names[:5]}, tmp_path / "a.safetensors")
    save_file({name: weights[name] for name in names[5:]}, tmp_path / "b.safetensors")
    weight_map = {name: "a.safetensors" if i < 5 else "b.safetensors" for i, name in enumerate(names)}
    index = str({"weight_map": weight_map}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    read = dict(read_weights(tmp_path))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in names)


@pytest.mark.parametrize("name", ["gone.safetensors", "../a.safetensors", 7])
def test_an_index_naming_no_file_beside_it_is_refused(tmp_path: Path, name: object) -> None:
    index = str({"weight_map": {"x": name}}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index|gone\.safetensors: missing"):
        list(read_weights(tmp_path))


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither"):
        list(read_weights(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        list(read_weights(tmp_path))
