"""What a decoder-only model consists of, as values that its family's file states. Free of torch.

`decoder.py` builds a model of them and computes with it. A family is a way to read a config.json as a `Design`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.kernels.routing import Routing
from pdserve.model.input_design import LayerInputs
from pdserve.model.kv_heads import Heads
from pdserve.model.rope_config import RopeConfig
from pdserve.model.state_design import GatedDelta, Recurrent, ShortConv, StateSpace


class Activation(StrEnum):
    """What an MLP does with each feature, by transformers' names in a config."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"  # its approximation by tanh
    SQUARED_RELU = "relu2"
    SWIGLU_OAI = "swigluoai"  # of gates and ups together: clamped, and (up + 1) * gate * sigmoid(1.702 * gate)
    XIELU = "xielu"  # with two scalars that are learnt in each layer (Huang, Schlag 2024)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """x / rms(x) * (weight + plus)."""

    eps: float
    plus: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / std(x) * (weight + plus) + bias."""

    eps: float
    plus: float = 0.0
    bias: bool = True


Norm = RmsNorm | LayerNorm


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of q and of k."""

    eps: float
    q: str = "q_norm"
    k: str | None = "k_norm"  # None: a layer without keys of its own
    after_rope: bool = False
    plus: float = 0.0  # to the weights
    has_weights: bool = True
    of_values: bool = False  # over each head of v, too, without weights


@dataclass(frozen=True, slots=True)
class WideNorms:
    """RMS norms over all heads of q together, and over all of k, before rope."""

    eps: float
    q: str = "q_norm"
    k: str = "k_norm"


@dataclass(frozen=True, slots=True)
class Scores:
    """Which keys a query sees, and what becomes of their products."""

    scale: float | None = None  # None: head_dim ** -0.5
    window: int | None = None  # a token sees itself and the window - 1 before it; None: all before it
    aligned: bool = False  # windows begin at multiples of their length: a token sees those of its own one before it
    soft_cap: float | None = None  # c of c * tanh(score / c)
    has_sinks: bool = False  # a learnt score of each head joins the softmax, without a value (GPT-OSS, 2025)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """The attention of a layer: its matrices, what happens to q and k before they meet, and what then."""

    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: HeadNorms | WideNorms | None = None
    fused: bool = False  # the file has one `qkv_proj`
    o: str = "o_proj"
    scores: Scores = Scores()
    gated: bool = False  # each head's queries come with a gate, whose sigmoid multiplies what the head attends to
    num_inputs: int = 1  # rows of the hidden size that lie side by side in what q, k and v are made of
    heads: Heads | None = None  # where layers with a window have others than those that see all tokens
    has_values: bool = True  # the file has `v_proj`; else values are keys before their norm and their rope
    block: str = "self_attn"  # within a layer
    reads: int | None = None  # the layer whose keys and values it attends to; None: it makes its own


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024): a layer keeps one narrow row for each token.

    A row is a key that all heads share, which turns, beside a latent, of which their other keys and values are made.
    So queries meet rows if those products are taken into the queries and the outputs.
    """

    rope: RopeConfig  # of the features that turn alone
    q_rank: int | None  # of queries' own latent; None: they are products of the layer's input
    kv_rank: int  # of keys' and values' latent
    still: int  # features of a head's query that do not turn
    turning: int  # and those that do
    value_dim: int
    eps: float  # of the norms of latents
    bias: bool  # of the products that make latents, and of the output
    scores: Scores

    @property
    def row_width(self) -> int:
        return self.kv_rank + self.turning


@dataclass(frozen=True, slots=True)
class Beside:
    """Attention and a state space over the same input, whose outputs are added (Falcon-H1, 2025)."""

    attention: SelfAttention
    space: StateSpace
    attention_scales: tuple[float, float] = (1.0, 1.0)  # of its input and of its output
    space_scale: float = 1.0  # of its output


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    inner_size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    fused: bool = False  # the file has gate and up in one matrix, by the gate's name
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    input_scale: float = 1.0
    output_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x)))."""

    inner_size: int
    activation: Activation
    bias: bool = False
    up: str = "up_proj"
    down: str = "down_proj"


Unmixed = GatedMlp | PlainMlp


@dataclass(frozen=True, slots=True)
class Stacked:
    """How a checkpoint holds a layer's experts: gates and ups of all in one tensor, downs in another."""

    gate_up: str
    down: str
    inputs_first: bool = False  # [experts, inputs, outputs]; else [experts, outputs, inputs]
    alternating: bool = False  # gate, up, gate, up; else all gates come first


@dataclass(frozen=True, slots=True)
class Latent:
    """A narrower row of each token, which experts take in its place, and make: by two products (Nemotron 3, 2026)."""

    size: int
    into: str = "fc1_latent_proj"  # within the block
    out_of: str = "fc2_latent_proj"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of MLPs, of which each token takes some: the sum of what they make of it, by weights."""

    num_experts: int
    expert: Unmixed
    routing: Routing
    shared: Unmixed | None = None  # that every token takes, too
    shared_name: str = "shared_experts"
    shared_is_outside: bool = False  # named beside the block, not within it
    shared_gate: str | None = None  # whose sigmoid multiplies what the shared one makes
    block: str = "mlp"  # within a layer
    router: str = "gate"
    router_bias: bool = False  # added to logits
    stacked: Stacked | None = None  # else each has tensors of its own
    bias_in_row: bool = False  # the bias of choices is a matrix of one row
    weighs_inputs: bool = False  # weights multiply what an expert takes, not what it makes
    latent: Latent | None = None  # that experts take; routers and the shared one take the token's whole row

    def within(self, layer: str) -> str:
        """Return what names of a layer's mixture begin with, where the layer's own begin with `layer`."""
        return f"{layer}{self.block}." if self.block else layer

    @property
    def inner_size(self) -> int:
        """Return how many features a token has within the MLPs that it takes."""
        return self.routing.num_chosen * self.expert.inner_size + (self.shared.inner_size if self.shared else 0)


@dataclass(frozen=True, slots=True)
class Around:
    """The norms before and after attention or MLP, by name: x + after(block(before(x))). None: there is none."""

    before: str | None
    after: str | None = None


@dataclass(frozen=True, slots=True)
class BesideExperts:
    """An MLP and experts over the same rows, each between norms of its own; their results are added (Gemma 4)."""

    mlp: GatedMlp
    experts: Experts
    norm: RmsNorm
    around: tuple[Around, Around]  # the MLP, and the experts
    router_norm: str  # a tensor: rows are normed and multiplied with it, and divided by √hidden, before experts' router

    @property
    def inner_size(self) -> int:
        return self.mlp.inner_size + self.experts.inner_size


Mlp = Unmixed | Experts | BesideExperts


Mixer = SelfAttention | LatentAttention | Recurrent | StateSpace | Beside


@dataclass(frozen=True, slots=True)
class Sequential:
    """A layer whose MLP sees what its attention has added; it may have one of both alone (Nemotron-H, 2025)."""

    attention: Mixer | None
    mlp: Mlp | None
    norm: Norm
    around_attention: Around = Around("input_layernorm")
    around_mlp: Around = Around("post_attention_layernorm")
    mlp_name: str = "mlp"  # of an MLP that is no mixture
    residual_scale: float = 1.0  # of what attention and MLP add; only where no norm comes after them
    scalar: str | None = None  # the name of a learnt number that multiplies what the layer returns


@dataclass(frozen=True, slots=True)
class Parallel:
    """A layer whose attention and MLP see the same: x + attention(norm(x)) + mlp(norm(x))."""

    attention: SelfAttention
    mlp: Mlp
    norm: Norm
    before: str = "input_layernorm"


Layer = Sequential | Parallel


@dataclass(frozen=True, slots=True)
class Head:
    """What logits are computed by, after the last layer."""

    norm: Norm
    norm_name: str = "model.norm"
    bias: bool = False
    scale: float = 1.0  # of logits
    soft_cap: float | None = None  # c of c * tanh(logit / c), after the scale


@dataclass(frozen=True, slots=True)
class Embedding:
    """How tokens become the first layer's input."""

    scale: float = 1.0
    rounds_scale: bool = False  # to the model's dtype, before it multiplies


@dataclass(frozen=True, slots=True)
class Design:
    """All of a model but its sizes, which `ModelConfig` has."""

    layers: tuple[Layer, ...]
    head: Head
    embedding: Embedding = field(default_factory=Embedding)
    num_more_layers: int = 0  # in the file after these: they guess tokens, and are not used
    guessing: str | None = None  # what names of tensors begin with that guess tokens: they are not used
    layer_inputs: LayerInputs | None = None

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """Return the MLPs of the layers that have one."""
        return tuple([layer.mlp for layer in self.layers if layer.mlp is not None])

    @property
    def mixtures(self) -> list[Experts]:
        own = [mlp.experts if isinstance(mlp, BesideExperts) else mlp for mlp in self.mlps]
        return [each for each in own if isinstance(each, Experts)]

    @property
    def has_wide_norms(self) -> bool:
        """Say whether a norm is over the features of all heads."""
        of_heads = (isinstance(getattr(each, "qk_norm", None), WideNorms) for each in self.attentions)
        return any(of_heads) or any(isinstance(each, StateSpace) and each.has_wide_norm for each in self.recurrent)

    @property
    def attentions(self) -> tuple[SelfAttention | LatentAttention | None, ...]:
        """Return the attention of each layer, where it has one."""
        return tuple(_attention(layer.attention) for layer in self.layers)

    @property
    def readers(self) -> dict[int, int]:
        """Return the layers that attend to keys and values of another one, which keeps them, and that one."""
        found = ((place, getattr(each, "reads", None)) for place, each in enumerate(self.attentions))
        return {place: source for place, source in found if source is not None}

    def scores_of(self, layers: Iterable[int]) -> list[Scores]:
        """Return what becomes of scores in those of some layers that have attention."""
        attentions = self.attentions
        return [each.scores for layer in layers if (each := attentions[layer]) is not None]

    @property
    def recurrent(self) -> tuple[Recurrent | StateSpace | None, ...]:
        """Return of each layer what keeps a state, where something does."""
        found = (layer.attention for layer in self.layers)
        return tuple(
            each.space if isinstance(each, Beside) else each if isinstance(each, Recurrent | StateSpace) else None
            for each in found
        )

    @property
    def longest_context(self) -> int | None:
        """Return the most tokens that the ropes serve, where they say so."""
        ends = [each.rope.longest_context for each in self.attentions if each is not None]
        return min((end for end in ends if end is not None), default=None)


def _attention(mixer: Mixer | None) -> SelfAttention | LatentAttention | None:
    match mixer:
        case Beside(attention=attention):
            return attention
        case ShortConv() | GatedDelta() | StateSpace():
            return None
        case _:
            return mixer
