"""What the files of one architecture may hold, and in which ways they differ from a Llama's. Free of numpy."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

from pdserve.model.fields import Fields

Shapes = Mapping[str, tuple[int, ...]]  # of a file's tensors

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

CHOOSING = "exp_probs_b"  # a bias that chooses experts
SHARED_GATE = "ffn_gate_inp_shexp"  # a matrix of one row, which the converter writes as a vector
FUSED = "attn_qkv"  # q, k and v in one: the converter does so for any family, if asked to
RMS_EPSILON, LAYER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class Number:
    """A number in the metadata that Hugging Face's config has, too."""

    key: str
    name: str  # in config.json
    default: float | None = None  # None: the file must have it


@dataclass(frozen=True, slots=True)
class Windows:
    """What it means that the metadata have a window. A window of 0 is none."""

    architecture: str  # Hugging Face's
    period: int | None = None  # each so many-th layer sees all tokens, unless the file says which; None: none does
    required: bool = False
    own_rope: bool = False  # layers with a window have a rope of their own, which is not scaled
    theta: float | None = None  # of that rope, unless the file says; None: that of the others


@dataclass(frozen=True, slots=True)
class Experts:
    """What it means that the metadata count experts. Those of a layer are in three tensors of three dimensions."""

    architecture: str  # Hugging Face's
    block: str  # of a layer
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count: str = "num_experts"  # in config.json
    inner_size: str = "moe_intermediate_size"  # in config.json
    chosen: str = "num_experts_per_tok"  # in config.json
    bias_in_row: bool = False  # the bias that chooses has an axis of one, which files may have lost
    router: str = "gate"
    by_sigmoid: bool = False  # how they are scored; else by softmax
    scaled: bool = False  # files say what weights are multiplied with, and whether they are normalized
    others: Mapping[str, str] = field(default_factory=dict)  # whole numbers that files may have, in config.json
    own: Mapping[str, object] = field(default_factory=dict)  # of config.json, which files do not say


@dataclass(frozen=True, slots=True)
class States:
    """What it means that some layers keep states."""

    kinds: Mapping[str, str] = field(default_factory=dict)  # of layers in config.json, each by a part that they have
    kinds_key: str = "layer_types"  # in config.json
    may_guess: bool = False  # blocks behind the others may guess tokens


NUM_MORE = "num_nextn_predict_layers"  # in config.json; in files, blocks count these too
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What the files of one architecture hold."""

    architecture: str  # Hugging Face's
    names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)  # of the parts of a layer
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    bare_names: Mapping[str, str] = field(default_factory=dict)  # of parts that are neither weight nor bias there
    biases: Mapping[str, str] = field(default_factory=dict)  # flags of config.json, each with a part that has a bias
    weights: Mapping[str, str] = field(default_factory=dict)  # flags, each with a part that is there
    epsilon: Number = field(default_factory=lambda: Number(RMS_EPSILON, "rms_norm_eps"))
    numbers: tuple[Number, ...] = ()
    rope: Mapping[str, object] = field(default_factory=dict)  # of rope_parameters, which files do not say
    windows: Windows | None = None  # None: a file with a window is refused
    experts: Experts | None = None  # None: a file with experts is refused
    scores_by_share: int | None = None  # scores are scaled by the head, or by hidden size over heads in so many layers
    interleaved: bool = (
        False  # rows of q and k that turn together lie side by side, and on Hugging Face half a head apart
    )
    has_latents: bool = False  # see gguf_latents.py
    partial_rope: bool = False  # a part of each head may turn
    long_rope: bool = False  # the file may have factors for short and for long contexts
    norms_plus: float = 0.0  # what norms in the file have on top of Hugging Face's
    config: Callable[[Fields, Shapes], dict[str, object]] | None = None  # what the config.json has beside all this
    states: States | None = None  # None: all layers have attention
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # matrices, each by the parts it is in
    inert: Container[str] = ()  # keys that change no result in this family
    xielu: bool = False  # the metadata have scalars of each layer's activation


def without(*parts: str) -> dict[str, str]:
    return {part: name for part, name in LAYER_NAMES.items() if part not in parts}


def shared(block: str) -> dict[str, str]:
    """Return the names of the MLP that every token takes beside its experts."""
    return {f"ffn_{part}_shexp": f"mlp.{block}.{part}_proj" for part in ("gate", "up", "down")}


OF_GRANITE = (
    Number("attention.scale", "attention_multiplier"),
    Number("embedding_scale", "embedding_multiplier", 1.0),
    Number("logit_scale", "logits_scaling"),
    Number("residual_scale", "residual_multiplier", 1.0),
)
