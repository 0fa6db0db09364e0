"""GGUF tensors as Hugging Face weights."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from held_weights import read_all
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_file import read_gguf
from pdserve.checkpoint.open import open_checkpoint

Array = npt.NDArray[np.float32]
WriteGguf = Callable[[str, Mapping[str, object], Mapping[str, Array]], Path]

SHAPE = {
    "vocab_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def as_gguf(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def interleave(values: Array, num_heads: int) -> Array:
    """Order rows as llama.cpp wants them for its rope: i and i + head_dim/2 side by side."""
    halves = np.split(values, num_heads * 2)
    heads = [np.stack(halves[2 * head : 2 * head + 2], axis=1) for head in range(num_heads)]
    return np.concatenate([head.reshape(-1, *values.shape[1:]) for head in heads])


def state_of(model: torch.nn.Module) -> dict[str, Array]:
    torch.manual_seed(0)
    return {name: torch.randn_like(tensor).numpy() for name, tensor in model.state_dict().items()}


def test_llama_rows_are_put_back_in_order(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    state = state_of(LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)))
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
    tensors = {}
    for name, values in state.items():
        num_heads = next((count for part, count in heads.items() if part in name), None)
        tensors[as_gguf(name)] = interleave(values, num_heads) if num_heads else values
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    read_back = read_all(open_checkpoint(write_gguf("llama", metadata, tensors)).weights())
    assert read_back.keys() == state.keys()
    for name, values in state.items():
        np.testing.assert_array_equal(read_back[name], values, err_msg=name)


def test_qwen3_rows_are_left_as_they_are(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    state = state_of(Qwen3ForCausalLM(Qwen3Config(**SHAPE)))
    metadata = {f"qwen3.{key}": value for key, value in (tiny_model | {"attention.key_length": 8}).items()}
    tensors = {as_gguf(name): values for name, values in state.items()}
    read_back = read_all(open_checkpoint(write_gguf("qwen3", metadata | tokenizer_keys, tensors)).weights())
    assert read_back.keys() == state.keys()
    for name, values in state.items():
        np.testing.assert_array_equal(read_back[name], values, err_msg=name)


def test_half_precision_is_widened(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object]
) -> None:
    halves = np.arange(128, dtype=np.float16).reshape(4, 32)
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    weights = read_all(open_checkpoint(write_gguf("llama", metadata, {"token_embd.weight": halves})).weights())
    values = weights["model.embed_tokens.weight"]
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, halves.astype(np.float32))


def test_tensors_without_a_place_are_refused_by_name(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object], embedding: dict[str, Array]
) -> None:
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    path = write_gguf("llama", metadata, {**embedding, "blk.0.ssm_conv1d.weight": np.zeros((2, 32), np.float32)})
    with pytest.raises(ConfigError, match=r"tiny\.gguf: blk\.0\.ssm_conv1d\.weight: there is no place"):
        read_all(open_checkpoint(path).weights())


def test_a_file_cut_short_is_noticed_wherever_it_was_cut(
    write_gguf: WriteGguf, tiny_model: dict[str, object], tokenizer_keys: dict[str, object], embedding: dict[str, Array]
) -> None:
    metadata = {f"llama.{key}": value for key, value in tiny_model.items()} | tokenizer_keys
    path = write_gguf("llama", metadata, embedding)
    whole = path.read_bytes()
    header_bytes = read_gguf(path).tensors[0].offset_bytes
    for num_bytes in (0, 3, 5, 20, 100, header_bytes // 2, header_bytes - 64):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ConfigError, match=r"tiny\.gguf: .*(cut short|not a GGUF file)"):
            open_checkpoint(path)
    path.write_bytes(whole[:-33])
    with pytest.raises(ConfigError, match=r"tiny\.gguf: token_embd\.weight: the file ends within it"):
        read_all(open_checkpoint(path).weights())


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))
    with pytest.raises(ConfigError, match="GGUF version 50331648"):
        open_checkpoint(path)
    path.write_bytes(b"GGML" + bytes(20))
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        open_checkpoint(path)
