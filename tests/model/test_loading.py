import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from held_weights import held, read_all
from safetensors.torch import save_file
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.hf_directory import read_weights
from pdserve.model.config import FAMILIES, ModelConfig
from pdserve.model.loading import dummy_weights, load_model
from pdserve.model.weights import Part, Stored, Weights

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
HYBRID = {
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_n_heads": 4},
    "Gemma4ForCausalLM": {"vocab_size_per_layer_input": 40},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*-M"},
}
CONFIG = ModelConfig.from_hf(SHAPE)
Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


def load(weights: Weights) -> None:
    load_model(CONFIG, weights, torch.float32)


def test_a_bias_that_the_model_does_not_have_may_be_zero_and_nothing_else() -> None:
    weights = dummy_weights(CONFIG)
    load({**weights, **held({"model.layers.0.mlp.down_proj.bias": torch.zeros(16)})})
    with pytest.raises(ConfigError, match=r"^model\.layers\.0\.mlp\.down_proj\.bias: not a tensor of"):
        load({**weights, **held({"model.layers.0.mlp.down_proj.bias": torch.tensor([0.0] * 15 + [1e-3])})})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_architecture_that_a_config_may_name_has_a_model(architecture: str) -> None:
    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, **HYBRID.get(architecture, {})}
    config = ModelConfig.from_hf({"architectures": [architecture], **heads, **shape})
    load_model(config, dummy_weights(config), torch.float32)


def test_learning_the_shapes_of_a_model_loads_no_compiler() -> None:
    code = f"""
import sys
from pdserve.model.config import ModelConfig
from pdserve.model.loading import shapes_of
assert len(shapes_of(ModelConfig.from_hf({SHAPE}))) == 27
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{Q_BIAS}: missing"):
        load({name: stored for name, stored in dummy_weights(CONFIG).items() if name != Q_BIAS})


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight, .* and 24 more: missing"):
        load({})


def test_an_unexpected_tensor_is_named() -> None:
    extra = held({"model.layers.2.self_attn.q_proj.weight": torch.zeros(16, 16)})
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight: not a tensor of"):
        load({**dummy_weights(CONFIG), **extra})


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    with pytest.raises(ConfigError, match=rf"{Q_BIAS}: shape \(2, 16\), the config asks for \(16,\)"):
        load({**dummy_weights(CONFIG), **held({Q_BIAS: torch.zeros(2, 16)})})


def test_a_tensor_given_twice_is_named(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"b\.safetensors: x: given twice"):
        read_weights(tmp_path)


def test_nothing_is_read_of_weights_that_do_not_fit() -> None:
    def read(_: Part) -> Tensor:
        raise AssertionError("was read")

    unread = {name: replace(stored, read=read) for name, stored in dummy_weights(CONFIG).items()}
    with pytest.raises(ConfigError, match="not a tensor of"):
        load({**unread, "extra": Stored((1,), read)})
    with pytest.raises(ConfigError, match="missing"):
        load({name: stored for name, stored in unread.items() if name != Q_BIAS})


def test_tensors_the_model_does_not_read_are_passed_over() -> None:
    tied = replace(CONFIG, tie_word_embeddings=True)
    ignored = dict.fromkeys(("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"), torch.zeros(1))
    load_model(tied, {**dummy_weights(tied), **held(ignored)}, torch.float32)


def test_matrices_of_keys_and_values_that_a_layer_does_not_make_are_passed_over() -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "architectures"}
    kinds = ["full_attention"] * 2
    config = ModelConfig.from_hf(
        {**shape, "architectures": ["Gemma4ForCausalLM"], "layer_types": kinds, "num_kv_shared_layers": 1}
        | {"vocab_size_per_layer_input": 40}
    )
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    unread = {f"model.layers.1.self_attn.{name}.weight": torch.zeros(1) for name in names}
    load_model(config, {**dummy_weights(config), **held(unread)}, torch.float32)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.v_norm\.weight: not a tensor of"):
        load_model(
            config,
            {**dummy_weights(config), **held({"model.layers.0.self_attn.v_norm.weight": torch.zeros(1)})},
            torch.float32,
        )


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    load_model(CONFIG, dummy_weights(CONFIG), torch.float32, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_arrays_load_like_tensors_and_dtypes_are_converted() -> None:
    tensors = read_all(dummy_weights(CONFIG))
    arrays = {name: Stored(tuple(t.shape), lambda _, t=t: t.clone().numpy()) for name, t in tensors.items()}
    model = load_model(CONFIG, arrays, torch.bfloat16)
    expected = tensors["model.embed_tokens.weight"]
    assert torch.equal(model.ops.embed(torch.arange(len(expected)), model.embedding), expected.bfloat16())


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (read_all(dummy_weights(CONFIG, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[Q_BIAS], other[Q_BIAS])


def test_a_checkpoint_in_several_files_is_read_through_its_index(tmp_path: Path) -> None:
    weights = read_all(dummy_weights(CONFIG))
    names = list(weights)
    save_file({name: weights[name] for name in names[:5]}, tmp_path / "a.safetensors")
    save_file({name: weights[name] for name in names[5:]}, tmp_path / "b.safetensors")
    weight_map = {name: "a.safetensors" if i < 5 else "b.safetensors" for i, name in enumerate(names)}
    index = str({"weight_map": weight_map}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    read = read_all(read_weights(tmp_path))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in names)


@pytest.mark.parametrize("name", ["gone.safetensors", "../a.safetensors", 7])
def test_an_index_naming_no_file_beside_it_is_refused(tmp_path: Path, name: object) -> None:
    index = str({"weight_map": {"x": name}}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index|gone\.safetensors: missing"):
        read_weights(tmp_path)


def test_a_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        read_weights(tmp_path)
