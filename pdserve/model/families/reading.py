"""What the readers of several families do alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pdserve.model.design import Activation, Design, GatedMlp, Layer, SelfAttention
from pdserve.model.fields import Fields
from pdserve.model.rope_config import RopeConfig

L = TypeVar("L", bound=Layer)
FULL, SLIDING = "full_attention", "sliding_attention"
APART, FUSED = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Family:
    """How the configs of one architecture are read."""

    read: Callable[[Fields], Design]
    defaults: Mapping[str, object] = field(default_factory=dict)  # of keys that all models have, where it has its own


def repeated(layer: Layer, fields: Fields) -> tuple[Layer, ...]:
    """Return the layers of a model whose layers are alike."""
    return (layer,) * fields.num_layers


def swiglu(fields: Fields, *, bias: bool = False, fused: bool = False) -> GatedMlp:
    """Return the gated MLP of a Llama. fused: the file has gate and up in one matrix."""
    names = FUSED if fused else APART
    return GatedMlp(fields.positive("intermediate_size"), activation(fields, Activation.SILU), bias, fused, names)


def activation(fields: Fields, *served: Activation, key: str = "hidden_act") -> Activation:
    """Return what `key` names; the first of those that are served unless it is given."""
    name = fields.text(key, served[0])
    if name not in served:
        raise fields.unsupported(key, f"one of {', '.join(served)}")
    return Activation(name)


def window(fields: Fields) -> int | None:
    """Return the window of all layers, if there is one."""
    return fields.positive("sliding_window") if fields.has("sliding_window") else None


def windows(fields: Fields, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the window of each layer.

    slides: says of a layer whether it has one, where `layer_types` does not. ConfigError for another kind of layer.
    """
    kinds = kinds_of_layers(fields, (FULL, SLIDING), lambda layer: SLIDING if slides(layer) else FULL)
    if SLIDING not in kinds:
        fields.optional_int("sliding_window")
        return (None,) * len(kinds)
    size = fields.positive("sliding_window")
    return tuple(size if kind == SLIDING else None for kind in kinds)


def kinds_of_layers(fields: Fields, served: tuple[str, ...], usual: Callable[[int], str]) -> tuple[str, ...]:
    """Return the kind of each layer: by `layer_types`, or the usual one. ConfigError for a kind that is not served."""
    count = fields.num_layers
    kinds = fields.texts("layer_types") or tuple(map(usual, range(count)))
    if len(kinds) != count or not set(served).issuperset(kinds):
        raise fields.unsupported("layer_types", f"{' or '.join(served)} for each of {count} layers")
    return kinds


def layers_by_window(windows: tuple[int | None, ...], full: Layer, sliding: Layer) -> tuple[Layer, ...]:
    """Return the layers of a model: `full` where there is no window, and `sliding` with the window where there is."""
    return tuple(full if window is None else _with_window(sliding, window) for window in windows)


def _with_window(layer: Layer, window: int) -> Layer:
    attention = _self_attention(layer)
    return replace(layer, attention=replace(attention, scores=replace(attention.scores, window=window)))


def with_rope(layer: L, rope: RopeConfig) -> L:
    """Return a layer with self-attention under another rope."""
    return replace(layer, attention=replace(_self_attention(layer), rope=rope))


def rotating(fields: Fields) -> list[bool]:
    """Say of each layer whether it has rope, where some have none (Yang et al. 2025, RNoPE)."""
    num_layers, interval = fields.num_layers, fields.positive("no_rope_layer_interval", 4)
    given = fields.numbers("no_rope_layers") if fields.has("no_rope_layers") else ()
    if not given:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(given) != num_layers:
        raise fields.unsupported("no_rope_layers", f"a 0 or a 1 for each of {num_layers} layers")
    return [rotates != 0.0 for rotates in given]  # a 1 means rope, whatever the key says


def _self_attention(layer: Layer) -> SelfAttention:
    assert isinstance(layer.attention, SelfAttention), "no other has windows, or several ropes"
    return layer.attention


def require(fields: Fields, **values: object) -> None:
    """Raise ConfigError if one of the keys is given with another value."""
    for key, value in values.items():
        fields.must_be(key, value)
