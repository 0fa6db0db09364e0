"""What every model's config.json says, checked and typed, and which family reads the rest of it. Free of torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from pdserve.base.errors import ConfigError
from pdserve.model.design import Design, LatentAttention, Scores, SelfAttention
from pdserve.model.families import llama
from pdserve.model.families.apertus import APERTUS
from pdserve.model.families.arcee import ARCEE
from pdserve.model.families.bamba import BAMBA
from pdserve.model.families.cohere2 import COHERE2
from pdserve.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from pdserve.model.families.ernie import ERNIE, ERNIE_MOE
from pdserve.model.families.exaone4 import EXAONE4
from pdserve.model.families.experts import GLM4_MOE, MINIMAX_M2, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from pdserve.model.families.falcon_h1 import FALCON_H1
from pdserve.model.families.gated_delta import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from pdserve.model.families.gemma import GEMMA, GEMMA_2, GEMMA_3
from pdserve.model.families.gemma4 import GEMMA_4
from pdserve.model.families.glm4 import GLM4
from pdserve.model.families.gpt_oss import GPT_OSS
from pdserve.model.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from pdserve.model.families.hunyuan import HUNYUAN
from pdserve.model.families.lfm2 import LFM2, LFM2_MOE
from pdserve.model.families.llama4 import LLAMA_4
from pdserve.model.families.nemotron import NEMOTRON
from pdserve.model.families.nemotron_h import NEMOTRON_H
from pdserve.model.families.olmo2 import OLMO2, OLMO3
from pdserve.model.families.phi import PHI
from pdserve.model.families.phi3 import PHI3
from pdserve.model.families.reading import Family
from pdserve.model.families.seed_oss import SEED_OSS
from pdserve.model.families.smollm3 import SMOLLM3
from pdserve.model.families.starcoder2 import STARCODER2
from pdserve.model.fields import Fields
from pdserve.model.kv_heads import Heads
from pdserve.model.rope_config import LongRope
from pdserve.model.weights import Rank
from pdserve.model.wrappers import WRAPPERS, text_config

FAMILIES: Mapping[str, Family] = {  # by architecture
    "LlamaForCausalLM": llama.LLAMA,
    "Llama4ForCausalLM": LLAMA_4,
    "MinistralForCausalLM": llama.MINISTRAL,
    "Ministral3ForCausalLM": llama.MINISTRAL_3,
    "MistralForCausalLM": llama.MISTRAL,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": llama.QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Qwen3ForCausalLM": llama.QWEN3,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "ApertusForCausalLM": APERTUS,
    "ArceeForCausalLM": ARCEE,
    "BambaForCausalLM": BAMBA,
    "Cohere2ForCausalLM": COHERE2,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Ernie4_5ForCausalLM": ERNIE,
    "Ernie4_5_MoeForCausalLM": ERNIE_MOE,
    "Exaone4ForCausalLM": EXAONE4,
    "FalconH1ForCausalLM": FALCON_H1,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA_2,
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma4ForCausalLM": GEMMA_4,
    "Glm4ForCausalLM": GLM4,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    "NemotronForCausalLM": NEMOTRON,
    "NemotronHForCausalLM": NEMOTRON_H,
    "OlmoeForCausalLM": OLMOE,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO3,
    "Phi3ForCausalLM": PHI3,
    "PhiForCausalLM": PHI,
    "SeedOssForCausalLM": SEED_OSS,
    "SmolLM3ForCausalLM": SMOLLM3,
    "Starcoder2ForCausalLM": STARCODER2,
}

# Keys that change nothing in the forward pass. Any other key that no family looks up is refused.
INERT = frozenset(
    {
        *("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
        *("attn_implementation", "finetuning_task", "gradient_checkpointing", "is_decoder", "is_llama_config"),
        *("output_attentions", "output_hidden_states", "output_scores", "problem_type", "return_dict"),
        *("return_dict_in_generate", "task_specific_params", "tf_legacy_loss", "torchscript", "use_bfloat16"),
        *("cache_implementation", "use_cache", "use_flash_attn"),
        # of training; and of how others split what they compute
        *("chunk_size_feed_forward", "id2label", "initializer_range", "label2id", "num_labels", "pretraining_tp"),
        # of tokens and of sampling, which older versions of transformers wrote here
        *("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "forced_bos_token_id"),
        *("forced_eos_token_id", "pad_token_id", "prefix", "sep_token_id", "suppress_tokens", "unk_token_id"),
        *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "length_penalty"),
        *("exponential_decay_length_penalty", "max_length", "max_new_tokens", "max_sequence_length", "min_length"),
        *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values"),
        *("repetition_penalty", "temperature", "top_k", "top_p", "typical_p"),
    }
)
INERT_PREFIXES = ("_", "tokenizer_", "transformers.", "unsloth_")
INERT_SUFFIXES = ("dropout", "pdrop")  # of training
NO = ("add_cross_attention", "is_encoder_decoder", "rope_interleaved", "tie_encoder_decoder", "use_mrope")
NEUTRAL = {"pruned_heads": {}, **dict.fromkeys(NO, False)}  # the values that change nothing


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # where layers have other heads: of those that see all tokens
    head_dim: int  # the same; of latent attention: the width of a row
    max_position_embeddings: int  # the longest context
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None  # of the checkpoint, where it is named
    design: Design
    num_head_layers: int = 0  # of a drafting head, whose KV lies in pages behind that of these layers
    num_state_parts: int = 1  # into which pages divide states: one, or one for each KV head

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> "ModelConfig":
        """Read a Hugging Face config.json of transformers 4 or 5; ConfigError names the key at fault.

        A key is at fault, too, if the model's family does not know it.
        """
        config = text_config(config)
        architecture = _architecture(Fields(config))
        family = FAMILIES[architecture]
        fields = Fields({**family.defaults, **config})
        fields.texts("architectures")
        fields.skip("quantization_config")  # `checkpoint.published` reads it
        num_heads = fields.positive("num_attention_heads")
        num_kv_heads = fields.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}")
        hidden_size = fields.positive("hidden_size")
        head_dim = _head_dim(fields, hidden_size, num_heads)
        bos = fields.token_ids("bos_token_id")
        design = family.read(fields)
        if not any(design.attentions):
            raise fields.unsupported("layer_types", "attention in at least one layer")
        if latents := {each for each in design.attentions if isinstance(each, LatentAttention)}:
            (latent,) = latents
            num_kv_heads, head_dim = 1, latent.row_width  # as its absorbed form has them
        elif heads_in(design):
            num_kv_heads, head_dim = _whole_heads(design)
        _check_ropes(fields, design, latent.turning if latents else head_dim)
        read = cls(
            architecture=architecture,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            num_layers=len(design.layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_longest_context(fields, design),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            eos_token_ids=fields.token_ids("eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            dtype=fields.text("dtype", fields.text("torch_dtype", "")) or None,
            design=design,
        )
        _refuse_unread(fields, architecture)
        return read

    @property
    def is_latent(self) -> bool:
        """Say whether layers keep one row for a token, of which keys and values are made."""
        return any(isinstance(each, LatentAttention) for each in self.design.attentions)

    def with_heads(self, heads: Heads | None) -> Self:
        """Return the config that some layers see, which have these heads of keys and values; None: the model's."""
        return self if heads is None else replace(self, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)

    @property
    def kinds_of_heads(self) -> tuple[Self, ...]:
        """Return the config as layers of each kind see it."""
        return tuple(map(self.with_heads, heads_in(self.design) or (None,)))

    @property
    def has_unlike_heads(self) -> bool:
        """Say whether layers with a window have other heads of keys and values than those that see all tokens."""
        return len(heads_in(self.design)) > 1

    @property
    def shared_between_layers(self) -> str | None:
        """Return what layers have in common beside hidden states, so that they were tried in plain settings only."""
        if self.design.readers:
            return "layers that read keys and values of others"
        return None if self.design.layer_inputs is None else "inputs of each layer"

    @property
    def attends_in_torch(self) -> bool:
        """Say whether no kernel serves its attention: windows that begin at multiples of their length."""
        return any(each.scores.aligned for each in self.design.attentions if each is not None)

    @property
    def rope_dim(self) -> int:
        """Return how many features of a head ropes are of: the last ones of a latent's row, else all."""
        latent = next((each for each in self.design.attentions if isinstance(each, LatentAttention)), None)
        return self.head_dim if latent is None else latent.turning

    @property
    def longest_without_growth(self) -> int | None:
        """Return up to how many tokens no query grows with its position; None: none ever does."""
        growths = [each.rope.growth for each in self.design.attentions if each is not None]
        return min([each.length - each.first for each in growths if each is not None], default=None)

    @property
    def has_states(self) -> bool:
        """Say whether layers keep a state of a sequence, whose size does not depend on how long it is."""
        return any(each is not None for each in self.design.recurrent)

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Return of each layer how many float32 values a part of a state has; 0: the layer keeps none."""
        part = Rank(0, self.num_state_parts)
        return tuple([0 if each is None else each.of_rank(part).sizes.state for each in self.design.recurrent])

    @property
    def kv_parts(self) -> int:
        """Return how many rows a layer keeps of a token for each KV head: K and V, or one for both."""
        return 1 if self.is_latent else 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return how many tokens a token sees in each layer with attention, itself among them; None: all of them."""
        return tuple([each.scores.window for each in self.design.attentions if each is not None])

    def scale(self, scores: Scores) -> float:
        """Return what products of queries and keys are multiplied with."""
        return self.head_dim**-0.5 if scores.scale is None else scores.scale


def _architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    if len(names) != 1 or names[0] not in FAMILIES:
        raise fields.unsupported("architectures", f"one of {', '.join([*FAMILIES, *WRAPPERS])}")
    return names[0]


def _refuse_unread(fields: Fields, architecture: str) -> None:
    for key, value in NEUTRAL.items():
        fields.must_be(key, value)
    for key in fields.unread():
        if not (key in INERT or key.startswith(INERT_PREFIXES) or key.endswith(INERT_SUFFIXES)):
            raise fields.unsupported(key, f"{architecture} has no such key; leave it out if it changes no result")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise ConfigError(f"num_attention_heads: {num_heads} does not divide hidden_size {hidden_size}")
    head_dim = fields.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.unsupported("head_dim", "an even number")
    return head_dim


def heads_in(design: Design) -> frozenset[Heads]:
    """Return the heads of a model's layers, where they are not alike."""
    own = [each.heads for each in design.attentions if isinstance(each, SelfAttention)]
    return frozenset([each for each in own if each is not None])


def heads_of(design: Design, layers: Iterable[int]) -> Heads | None:
    """Return the heads that layers of one group have alike, where the model's layers are not alike."""
    attentions = design.attentions
    own = {each.heads for layer in layers if isinstance(each := attentions[layer], SelfAttention)}
    return next(iter(own)) if len(own) == 1 else None


def _whole_heads(design: Design) -> tuple[int, int]:
    """Return how many heads of keys and values layers have that see all tokens, and their size."""
    whole = [index for index, each in enumerate(design.attentions) if each is not None and each.scores.window is None]
    heads = heads_of(design, whole)
    assert heads is not None, "they are alike in every family"
    return heads.num_kv_heads, heads.head_dim


def _longest_context(fields: Fields, design: Design) -> int:
    longest, stated = design.longest_context, fields.positive("max_position_embeddings", 2048)
    return stated if longest is None else min(stated, longest)


def _check_ropes(fields: Fields, design: Design, head_dim: int) -> None:
    """Raise ConfigError if a rope does not fit the heads."""
    for rope, own in {(each.rope, heads_of(design, [index])) for index, each in enumerate(design.attentions) if each}:
        features = head_dim if own is None else own.head_dim
        turning = rope.turning(features)
        if turning % 2 or (turning == 0 and rope.share > 0.0):
            raise fields.unsupported("partial_rotary_factor", f"an even number of {features} features")
        if isinstance(rope.scaling, LongRope) and len(rope.scaling.short_factors) != turning // 2:
            raise ConfigError(f"short_factor: {len(rope.scaling.short_factors)} factors, not {turning // 2}")
