"""A GGUF file of each family gives transformers' logits, and what a family's files do not hold is refused by name."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf_logits import CLOSE, PROMPT, logits_of
from gguf_models import CASES, random_model, round_matrices, write_gguf
from gguf_state_models import STATE_CASES
from model_zoo import load_oracle

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_config import hf_config
from pdserve.checkpoint.gguf_families import FAMILIES
from pdserve.checkpoint.gguf_file import GgufFile, GgufTensor, read_gguf
from pdserve.checkpoint.gguf_weights import read_weights
from pdserve.checkpoint.open import open_checkpoint
from pdserve.model.config import ModelConfig
from pdserve.model.groups import Groups
from pdserve.model.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CODED = ("llama", "gemma2", "phi3-whole", "qwen2moe")  # of which codes are compared in each run


@pytest.mark.parametrize("kind", [None, pytest.param(GGMLQuantizationType.Q8_0, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_gguf_file_are_those_of_transformers(
    name: str, kind: GGMLQuantizationType | None, tmp_path: Path
) -> None:
    case, model = CASES[name], random_model(CASES[name])
    if kind is not None:
        round_matrices(model, kind, splits=case.splits)
    path = write_gguf(case, model, tmp_path / "tiny.gguf", kind)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(path), expected, **CLOSE)


@pytest.mark.parametrize("kind", [None, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("name", ["llama", "phi2", "seed_oss", "gemma2"])
def test_q_k_and_v_in_one_tensor_are_taken_apart(name: str, kind: GGMLQuantizationType | None, tmp_path: Path) -> None:
    case, model = CASES[name], random_model(CASES[name])
    if kind is not None:
        round_matrices(model, kind, splits=case.splits)
    path = write_gguf(case, model, tmp_path / "tiny.gguf", kind, fused=True)
    assert any(".attn_qkv." in tensor.name for tensor in read_gguf(path).tensors)
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(path), model(torch.tensor([PROMPT])).logits[0], **CLOSE)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.transformers_reads])
def test_files_of_the_tests_are_read_alike_by_transformers_itself(name: str, tmp_path: Path) -> None:
    path = write_gguf(CASES[name], random_model(CASES[name]), tmp_path / "tiny.gguf")
    with torch.inference_mode():
        expected = load_oracle(path)(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(path), expected, **CLOSE)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in CODED else pytest.mark.long) for each in CASES]
)
def test_codes_that_are_kept_mean_what_the_file_means(name: str, tmp_path: Path) -> None:
    path = write_gguf(CASES[name], random_model(CASES[name]), tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(path)
    assert checkpoint.coded_weights is not None
    floats, coded = checkpoint.weights(), checkpoint.coded_weights()
    assert floats.keys() == coded.keys()
    kept = 0
    for tensor, stored in coded.items():
        read, expected = stored.read(()), floats[tensor].read(())
        kept += isinstance(read, Groups)
        np.testing.assert_allclose(read.values() if isinstance(read, Groups) else read, expected, rtol=1e-6, atol=1e-7)
    assert kept > 8


def test_each_served_architecture_is_tested() -> None:
    written = {MODEL_ARCH_NAMES[case.arch] for case in (*CASES.values(), *STATE_CASES.values())}
    assert written == set(FAMILIES)


METADATA = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}


WINDOW = {"attention.sliding_window": 8}
YARN_LENGTH = "rope.scaling.original_context_length"


@pytest.mark.parametrize(
    ("architecture", "changes", "complaint"),
    [
        ("gemma", {"attn_logit_softcapping": 50.0}, r"gemma\.attn_logit_softcapping: 50\.0"),
        (
            "gemma",
            {"attention.sliding_window": 8},
            r"gemma\.attention\.sliding_window: 8 .*only with .* llama, gpt-oss, cohere2",
        ),
        ("glm4", {"expert_count": 8}, r"glm4\.expert_count: 8 .*only with .* llama, qwen3moe, qwen2moe"),
        ("qwen3moe", {"expert_count": 8, "expert_used_count": 9}, "num_experts_per_tok: 9"),
        (
            "qwen3moe",
            {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2},
            r"qwen3moe\.expert_gating_func: 2",
        ),
        (
            "glm4moe",
            {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 1},
            r"glm4moe\.expert_gating_func: 1",
        ),
        ("llama4", {"expert_count": 8, "attention.sliding_window": 0}, r"llama4\.attention\.sliding_window: 0"),
        ("llama4", {}, r"llama4\.expert_count: missing"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, r"olmoe\.attention\.clamp_kqv: 8\.0"),
        ("ernie4_5-moe", {"expert_count": 8, "expert_used_count": 9}, "moe_k: 9"),
        ("gpt-oss", {}, r"gpt-oss\.attention\.sliding_window: missing"),
        ("gemma3", {}, r"gemma3\.attention\.sliding_window: missing"),
        ("gemma3", {"attention.sliding_window": 0}, r"gemma3\.attention\.sliding_window: 0 is not"),
        (
            "gemma3",
            {**WINDOW, "attention.sliding_window_pattern": [True, False]},
            r"sliding_window_pattern: \[True, False",
        ),
        ("gemma3", {**WINDOW, "attention.sliding_window_pattern": 0}, r"gemma3\.attention\.sliding_window_pattern: 0"),
        ("gemma3", {**WINDOW, "final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping: 30\.0"),
        ("gemma2", {**WINDOW, "rope.freq_base_swa": 1e4}, r"gemma2\.rope\.freq_base_swa: 10000\.0"),
        ("glm4", {"nextn_predict_layers": 1}, r"glm4\.nextn_predict_layers: 1"),
        ("glm4", {"rope.dimension_count": 16}, r"glm4\.rope\.dimension_count: 16 .*1 to the head's 8"),
        ("granite", {"attention.scale": 1.0}, r"granite\.logit_scale: missing"),
        ("granite", {"attention.scale": 1.0, "logit_scale": 0.0}, r"logits_scaling: 0\.0"),
        ("nemotron", {"attention.layer_norm_epsilon": None}, r"nemotron\.attention\.layer_norm_epsilon: missing"),
        ("phi3", {"rope.scaling.type": "longrope"}, r"phi3\.rope\.scaling\.type: 'longrope'"),
        ("starcoder2", {"rope.dimension_count": 4, "attention.key_length": 8}, r"starcoder2\.rope\.dimension_count: 4"),
    ],
)
def test_keys_that_a_family_does_not_have_are_refused_by_name(
    architecture: str, changes: dict[str, object], complaint: str
) -> None:
    keys = {key: value for key, value in {**METADATA, **changes}.items() if value is not None}
    if "attention.layer_norm_epsilon" not in changes and FAMILIES[architecture].epsilon.name == "rms_norm_eps":
        del keys["attention.layer_norm_epsilon"]
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": v for key, v in keys.items()}
    file = GgufFile(Path("x.gguf"), metadata, (GgufTensor("token_embd.weight", (100, 32), 0, 0),))
    with pytest.raises(ConfigError, match=complaint):
        ModelConfig.from_hf(hf_config(file))


@pytest.mark.parametrize(
    ("architecture", "layers", "scale"), [("gemma2", 46, 8), ("gemma2", 26, 32), ("gemma3", 62, 8), ("gemma3", 18, 32)]
)
def test_scores_of_the_largest_gemmas_are_scaled_by_hidden_size_over_heads(
    architecture: str, layers: int, scale: int
) -> None:
    keys = {**METADATA, **WINDOW, "block_count": layers, "attention.key_length": 32, "attention.value_length": 32}
    del keys["attention.layer_norm_epsilon"]
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": v for key, v in keys.items()}
    file = GgufFile(Path("x.gguf"), metadata, (GgufTensor("token_embd.weight", (100, 32), 0, 0),))
    design = ModelConfig.from_hf(hf_config(file)).design
    assert {layer.attention.scores.scale for layer in design.layers} == {scale**-0.5}


LATENT = {
    "attention.kv_lora_rank": 512,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "rope.dimension_count": 64,
    "expert_used_count": 6,
    "leading_dense_block_count": 1,
}


def latent_model(names: Sequence[str] = (), **keys: object) -> dict[str, object]:
    given = {f"deepseek2.{key}": value for key, value in {**METADATA, **LATENT, **keys}.items()}
    del given["deepseek2.attention.layer_norm_epsilon"]
    tensors = tuple([GgufTensor(name, (100, 32), 0, 0) for name in ("token_embd.weight", *names)])
    return hf_config(GgufFile(Path("x.gguf"), {"general.architecture": "deepseek2", **given}, tensors))


@pytest.mark.parametrize(("count", "groups", "method"), [(64, (1, 1), "greedy"), (160, (8, 3), "group_limited_greedy")])
def test_files_of_older_converters_leave_groups_and_scores_of_deepseek_v2_to_be_known(
    count: int, groups: tuple[int, int], method: str
) -> None:
    config = latent_model(expert_count=count)
    assert (config["n_group"], config["topk_group"], config["topk_method"]) == (*groups, method)
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert (config["qk_nope_head_dim"], config["v_head_dim"], config["num_key_value_heads"]) == (128, 128, 4)


@pytest.mark.parametrize(("count", "groups"), [(256, (8, 4)), (384, (1, 1))])
def test_experts_with_a_bias_that_chooses_are_scored_as_in_deepseek_v3(count: int, groups: tuple[int, int]) -> None:
    config = latent_model(("blk.1.exp_probs_b.bias",), expert_count=count)
    assert (config["n_group"], config["topk_group"], config["topk_method"]) == (*groups, "noaux_tc")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({}, r"deepseek2\.expert_count: missing"),
        ({"expert_count": 64, "expert_gating_func": 3}, r"deepseek2\.expert_gating_func: 3"),
        (
            {"expert_count": 64, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, YARN_LENGTH: 4096},
            r"deepseek2\.rope\.scaling\.yarn_log_multiplier: missing",
        ),
    ],
)
def test_what_files_with_latents_must_say_is_asked_for_by_name(keys: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        latent_model(**keys)


@pytest.mark.parametrize(("lost", "complaint"), [("attn_v_b", "no values beside these keys"), ("attn_k_b", "v_b_proj")])
def test_a_half_of_the_matrix_that_expands_latents_is_not_enough(lost: str, complaint: str, tmp_path: Path) -> None:
    path = write_gguf(CASES["deepseek2"], random_model(CASES["deepseek2"]), tmp_path / "tiny.gguf")
    file = read_gguf(path)
    kept = replace(file, tensors=tuple([tensor for tensor in file.tensors if lost not in tensor.name]))
    config = ModelConfig.from_hf(hf_config(kept))
    with pytest.raises(ConfigError, match=complaint):
        load_model(config, read_weights(kept, config), torch.float32)


@pytest.mark.parametrize("missing", ["alpha_p", "beta"])
def test_scalars_of_xielu_are_checked(missing: str, tmp_path: Path) -> None:
    model = random_model(CASES["apertus"])
    with torch.no_grad():
        for name, buffer in model.state_dict().items():
            if name.endswith(f"act_fn.{missing}"):
                buffer.fill_(0.75)
    path = write_gguf(CASES["apertus"], model, tmp_path / "tiny.gguf")
    if missing == "beta":
        with pytest.raises(ConfigError, match=r"act_fn\.beta: 0\.75 is not supported"):
            logits_of(path)
    else:
        with torch.inference_mode():
            torch.testing.assert_close(logits_of(path), model(torch.tensor([PROMPT])).logits[0], **CLOSE)
