"""What the readers of several families do alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdserve.model.design import Activation, Design, GatedMlp, Layer
from pdserve.model.fields import Fields


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
    return GatedMlp(fields.positive("intermediate_size"), activation(fields, Activation.SILU), bias, fused)


def activation(fields: Fields, *served: Activation, key: str = "hidden_act") -> Activation:
    """Return what `key` names; the first of those that are served unless it is given."""
    name = fields.text(key, served[0])
    if name not in served:
        raise fields.unsupported(key, f"one of {', '.join(served)}")
    return Activation(name)


def window(fields: Fields) -> int | None:
    """Return the window of all layers, if there is one."""
    return fields.positive("sliding_window") if fields.has("sliding_window") else None


def require(fields: Fields, **values: object) -> None:
    """Raise ConfigError if one of the keys is given with another value."""
    for key, value in values.items():
        fields.must_be(key, value)
