"""Small random models of each family, as Hugging Face directories, and what transformers makes of a text."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

VOCAB = 512
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MSCALES = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 1024,
}

DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
DELTA_EXPERTS = {
    **DELTA_HEADS,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}


NEMOTRON_H_SPACE: dict[str, object] = {
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    # transformers raises shorter steps to `time_step_min` in prompts, and not where it decodes
    "time_step_min": 1e-9,
    "time_step_max": 1.0,
    "time_step_floor": 0.3,
}
GRANITE_LAYERS: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_expand": 1,
    "mamba_d_state": 12,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "embedding_multiplier": 1.5,
}
CHUNKED = {  # of Llama 4
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 48,
    "floor_scale": 40,
    "attn_scale": 0.5,
    "no_rope_layer_interval": 3,
    "rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 64},
}

LATENT_ROWS: dict[str, object] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
FOUR_GROUPS: dict[str, object] = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}  # of experts
BETWEEN_STATES: dict[str, object] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
}

GEMMA_4 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 6,
    "sliding_window": 96,
    "final_logit_softcapping": 20.0,
}

GEMMA_4_SHARED = {  # as E2B and E4B are
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "num_hidden_layers": 9,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding")]
    + ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "sliding_window": 96,
    "final_logit_softcapping": 20.0,
}

# Pages of the layers that see all tokens have fewer bytes than those of the other layers.
UNEVEN = {
    "num_hidden_layers": 7,
    "layer_types": [f"{'full' if place in (2, 5) else 'sliding'}_attention" for place in range(7)],
}


def causal(
    config: Callable[..., transformers.PreTrainedConfig], **own: object
) -> Callable[[dict[str, Any]], transformers.PreTrainedModel]:
    """Return what makes a model of SHAPE, with what the family adds to it, and with what a test asks for."""
    return lambda asked: transformers.AutoModelForCausalLM.from_config(config(**{**SHAPE, **own, **asked}))


FAMILIES = {
    "llama3": causal(transformers.LlamaConfig, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "mistral": causal(transformers.MistralConfig, sliding_window=96),
    "qwen2": causal(transformers.Qwen2Config),
    "qwen3": causal(transformers.Qwen3Config, head_dim=32),
}
MORE_FAMILIES = {  # which run through fewer tests, since they share code with these
    "apertus": causal(transformers.ApertusConfig, rope_parameters=LLAMA3_ROPE),
    "arcee": causal(transformers.ArceeConfig),
    "bamba": causal(
        transformers.BambaConfig,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_expand=1,
        mamba_d_state=12,
    ),
    "cohere2": causal(transformers.Cohere2Config, sliding_window=96, sliding_window_pattern=3, logit_scale=0.25),
    "deepseek-v2": causal(
        transformers.DeepseekV2Config,
        **{**LATENT_ROWS, "q_lora_rank": None},
        first_k_dense_replace=1,
        n_routed_experts=6,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
    "deepseek-v2-groups": causal(
        transformers.DeepseekV2Config,
        **LATENT_ROWS,
        n_routed_experts=12,
        topk_method="group_limited_greedy",
        **FOUR_GROUPS,
        routed_scaling_factor=2.0,
        moe_intermediate_size=48,
    ),
    "deepseek-v3": causal(
        transformers.DeepseekV3Config,
        **LATENT_ROWS | {"kv_lora_rank": 40, "qk_nope_head_dim": 16, "v_head_dim": 12, "rope_parameters": MSCALES},
        first_k_dense_replace=1,
        n_routed_experts=8,
        **FOUR_GROUPS,
        moe_intermediate_size=64,
    ),
    "ernie-moe": causal(
        transformers.Ernie4_5_MoeConfig, moe_num_experts=6, moe_k=3, moe_intermediate_size=64, moe_layer_start_index=1
    ),
    "ernie": causal(transformers.Ernie4_5Config, head_dim=16, use_bias=True),
    "gemma": causal(transformers.GemmaConfig, head_dim=32, tie_word_embeddings=False),
    "exaone4": causal(transformers.Exaone4Config, sliding_window=96, sliding_window_pattern=3),
    "gemma2": causal(
        transformers.Gemma2Config,
        head_dim=32,
        num_hidden_layers=4,
        query_pre_attn_scalar=16,
        sliding_window=96,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
    ),
    "gemma3": causal(
        transformers.Gemma3TextConfig,
        head_dim=32,
        num_hidden_layers=6,
        query_pre_attn_scalar=16,
        sliding_window=96,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        tie_word_embeddings=False,
    ),
    "gemma4": causal(transformers.Gemma4TextConfig, **GEMMA_4, tie_word_embeddings=False),
    "gemma4-moe": causal(
        transformers.Gemma4TextConfig,
        **GEMMA_4,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=64,
        tie_word_embeddings=False,
    ),
    "gemma4-shared": causal(
        transformers.Gemma4TextConfig,
        **GEMMA_4_SHARED,
        tie_word_embeddings=False,
    ),
    "glm4-lite": causal(
        transformers.Glm4MoeLiteConfig,
        **LATENT_ROWS | {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24},
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ),
    "gpt-oss": causal(
        transformers.GptOssConfig,
        head_dim=16,
        sliding_window=96,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={**YARN, "truncate": False},
    ),
    "glm4": causal(transformers.Glm4Config, head_dim=16),
    "glm4-moe": causal(
        transformers.Glm4MoeConfig,
        head_dim=16,
        n_routed_experts=8,
        **FOUR_GROUPS,
        moe_intermediate_size=64,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "granite": causal(
        transformers.GraniteConfig,
        embedding_multiplier=3.0,
        attention_multiplier=0.4,
        residual_multiplier=0.5,
        logits_scaling=0.5,
    ),
    "granite-moe": causal(
        transformers.GraniteMoeConfig,
        num_local_experts=6,
        num_experts_per_tok=2,
        attention_multiplier=0.4,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "granite-hybrid": causal(
        transformers.GraniteMoeHybridConfig,
        **GRANITE_LAYERS,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=96,
        mamba_n_groups=1,
    ),
    "granite-hybrid-dense": causal(
        transformers.GraniteMoeHybridConfig,
        **GRANITE_LAYERS,
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_n_groups=2,
        position_embedding_type="rope",
    ),
    "granite-4-attention": causal(
        transformers.GraniteMoeHybridConfig,
        **{**GRANITE_LAYERS, "layer_types": ["full_attention"] * 3},
        num_local_experts=0,
        shared_intermediate_size=128,
        position_embedding_type="rope",
    ),
    "hunyuan": causal(transformers.HunYuanDenseV1Config, head_dim=16),
    "llama-gelu": causal(transformers.LlamaConfig, hidden_act="gelu", mlp_bias=True, attention_bias=True),
    "llama-mscale": causal(transformers.LlamaConfig, rope_parameters={**YARN, "mscale": 4.0, "mscale_all_dim": 0.5}),
    "minimax-m2": causal(
        transformers.MiniMaxM2Config,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "ministral": causal(
        transformers.MinistralConfig,
        head_dim=16,
        sliding_window=96,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": causal(
        transformers.Ministral3Config,
        head_dim=32,
        rope_parameters={**YARN, "original_max_position_embeddings": 60, "llama_4_scaling_beta": 0.5},
    ),
    "mixtral": causal(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "nemotron": causal(transformers.NemotronConfig),
    "nemotron-h": causal(
        transformers.NemotronHConfig,
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        mlp_bias=True,
        **NEMOTRON_H_SPACE,
    ),
    "nemotron-h-moe": causal(
        transformers.NemotronHConfig,
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        n_routed_experts=8,
        **FOUR_GROUPS,
        routed_scaling_factor=2.5,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=96,
        **NEMOTRON_H_SPACE,
    ),
    "nemotron-h-latent": causal(
        transformers.NemotronHConfig,
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=96,
        moe_latent_size=32,
        **NEMOTRON_H_SPACE,
    ),
    "olmoe": causal(transformers.OlmoeConfig, num_experts=6, num_experts_per_tok=3, intermediate_size=64),
    "olmo2": causal(transformers.Olmo2Config),
    "olmo3": causal(
        transformers.Olmo3Config,
        sliding_window=96,
        num_hidden_layers=4,
        rope_parameters={"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "phi": causal(transformers.PhiConfig),
    "phi3": causal(
        transformers.Phi3Config, sliding_window=96, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75}
    ),
    "phi3-long": causal(
        transformers.Phi3Config,
        original_max_position_embeddings=1024,
        rope_parameters={**LONGROPE, "partial_rotary_factor": 0.75},
    ),
    "qwen2-moe": causal(
        transformers.Qwen2MoeConfig,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": causal(
        transformers.Qwen3MoeConfig,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "qwen2-windows": causal(transformers.Qwen2Config, use_sliding_window=True, sliding_window=96, max_window_layers=2),
    "falcon-h1": causal(
        transformers.FalconH1Config,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=24,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        lm_head_multiplier=0.5,
        embedding_multiplier=1.5,
        mlp_multipliers=[0.7, 0.4],
        key_multiplier=0.6,
        attention_in_multiplier=0.8,
        attention_out_multiplier=1.3,
        ssm_multipliers=[0.7, 1.4, 0.6, 1.2, 0.8],
        ssm_in_multiplier=1.25,
        ssm_out_multiplier=0.9,
    ),
    "lfm2-moe": causal(
        transformers.Lfm2MoeConfig,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        routed_scaling_factor=1.5,
    ),
    "lfm2": causal(transformers.Lfm2Config, layer_types=["conv", "full_attention", "conv"], conv_bias=True),
    "llama4": causal(transformers.Llama4TextConfig, num_hidden_layers=4, **CHUNKED),
    "qwen3-next": causal(transformers.Qwen3NextConfig, num_hidden_layers=4, head_dim=32, **DELTA_EXPERTS),
    "qwen3.5": causal(transformers.Qwen3_5TextConfig, **BETWEEN_STATES, **DELTA_HEADS),
    "qwen3.5-moe": causal(transformers.Qwen3_5MoeTextConfig, **BETWEEN_STATES, **DELTA_EXPERTS),
    "seed-oss": causal(transformers.SeedOssConfig, head_dim=32, attention_out_bias=True),
    "smollm3": causal(transformers.SmolLM3Config, no_rope_layer_interval=2),
    "starcoder2": causal(transformers.Starcoder2Config, tie_word_embeddings=False),
}

SIGHT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT |= {"image_size": 28, "patch_size": 14}


def seeing(
    config: Callable[..., transformers.PreTrainedConfig], text: str, sight: str, **own: object
) -> Callable[[dict[str, Any]], transformers.PreTrainedModel]:
    """Return what makes a model of SHAPE that also sees images. text, sight: the types of its parts."""

    def made(asked: dict[str, Any]) -> transformers.PreTrainedModel:
        parts = {
            "text_config": {**SHAPE, **own, **asked, "model_type": text},
            "vision_config": {**SIGHT, "model_type": sight},
        }
        return transformers.AutoModelForImageTextToText.from_config(config(**parts, tie_word_embeddings=False))

    return made


WITH_IMAGES = {
    "gemma3-images": seeing(
        transformers.Gemma3Config, "gemma3_text", "siglip_vision_model", head_dim=32, sliding_window=96
    ),
    "gemma4-images": seeing(transformers.Gemma4Config, "gemma4_text", "gemma4_vision", **GEMMA_4, pad_token_id=0),
    "gemma4-shared-images": seeing(
        transformers.Gemma4Config, "gemma4_text", "gemma4_vision", **GEMMA_4_SHARED, pad_token_id=0
    ),
    "qwen3.5-images": seeing(
        transformers.Qwen3_5Config, "qwen3_5_text", "qwen3_5_vision", **BETWEEN_STATES, **DELTA_HEADS
    ),
    "qwen3.5-moe-images": seeing(
        transformers.Qwen3_5MoeConfig, "qwen3_5_moe_text", "qwen3_5_moe_vision", **BETWEEN_STATES, **DELTA_EXPERTS
    ),
    "llama4-images": seeing(transformers.Llama4Config, "llama4_text", "llama4_vision_model", **CHUNKED),
    "mistral3-images": seeing(transformers.Mistral3Config, "mistral", "pixtral", sliding_window=None),
}
LATENT = ("deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "glm4-lite")
DELTA_NETS = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
GRANITES = ("granite-hybrid", "granite-hybrid-dense")
NEMOTRONS = ("nemotron-h", "nemotron-h-moe", "nemotron-h-latent")
STATES = (*DELTA_NETS, "bamba", "falcon-h1", *GRANITES, "lfm2", "lfm2-moe", *NEMOTRONS)
IN_TILES = (*LATENT, "falcon-h1", "qwen3-next", "qwen3.5-moe")  # all of whose matrices are in tiles in bfloat16 alone
IN_TORCH = (*IN_TILES, "llama4")  # of which torch computes a part in float32
WITH_EXPERTS = (
    *LATENT,
    *("ernie-moe", "gemma4-moe", "granite-hybrid", "glm4-moe", "gpt-oss", "granite-moe", "lfm2-moe", "llama4"),
    *("minimax-m2", "mixtral", "nemotron-h-moe", "nemotron-h-latent", "olmoe", "qwen2-moe", "qwen3-moe"),
    *("qwen3-next", "qwen3.5-moe"),
)


def write_model(family: str, folder: Path, **shape: int) -> Path:
    """Write a random float32 model with weights large enough that its greedy text does not settle on one token."""
    torch.manual_seed(7)
    model = {**FAMILIES, **MORE_FAMILIES, **WITH_IMAGES}[family](shape).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family in FAMILIES:
                _scale(name, parameter)
            else:
                _spread(name, parameter, 6.0 if family.startswith(DELTA_NETS) else 12.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.2)
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    model.save_pretrained(folder)
    _write_tokenizer(folder / "tokenizer.json")
    return folder


def _scale(name: str, parameter: torch.Tensor) -> None:
    if not name.endswith("norm.weight"):
        parameter.mul_(4.0)
    if name.endswith("bias"):
        parameter.normal_(std=0.5)


def _spread(name: str, parameter: torch.Tensor, factor: float) -> None:
    """Let nothing be all ones or zeros, which would hide what is left out.

    A factor of 12 lets states amplify how float32 rounds: by 5e-3 of a logit between a prompt at once and token by
    token, within transformers.
    """
    if "embed" in name or "lm_head" in name:
        parameter.normal_()
    elif parameter.ndim > 1 and not name.endswith("bias"):
        parameter.mul_(factor)
    else:
        parameter.add_(torch.randn_like(parameter) * 0.2)


def _write_tokenizer(path: Path) -> None:
    """Write a tokenizer that knows bytes, and words that no text is split into."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"word{i}" for i in range(len(pieces), VOCAB)]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def load_oracle(path: Path) -> transformers.PreTrainedModel:
    """Load a model with transformers, in float32."""
    if path.suffix == ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    has_images = "vision_config" in json.loads((path / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32).eval()


SAME_LOGIT = (
    1e-4  # of logits whose standard deviation is about 2; float32 differs by a tenth of it in sums of another order
)


@torch.inference_mode()
def first_disagreement(
    oracle: transformers.PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> int | None:
    """Return where `answer` first differs from the oracle's greedy continuation of `prompt`, or None.

    One pass over prompt and answer: as long as the answer agrees, each position's likeliest token is what greedy
    decoding would have drawn there. Of two tokens that are as likely but for rounding, either is right: in an answer
    of thousands of tokens there are such.
    """
    text = torch.tensor([[*prompt, *answer]])
    logits = oracle(text).logits[0, len(prompt) - 1 : -1]
    drawn = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    wrong = (logits.amax(-1) - drawn > SAME_LOGIT).nonzero()
    return int(wrong[0]) if len(wrong) else None


def prompt(length: int, seed: object = 0) -> list[int]:
    """Return random tokens, others for each length and seed."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def assert_right(oracle: transformers.PreTrainedModel, asked: Sequence[int], tokens: Sequence[int], count: int) -> None:
    """Assert that a greedy answer has so many tokens, and is the oracle's."""
    assert len(tokens) == count
    assert first_disagreement(oracle, asked, tokens) is None
