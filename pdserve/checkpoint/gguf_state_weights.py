"""Give tensors of layers with states the shapes, and the order of rows, that Hugging Face's have.

llama.cpp's converter keeps a rate of forgetting as it is used, and not its logarithm; it drops axes of one. It keeps
q, k, v and z of gated delta nets apart, and value heads that share a key head as far apart as there are key heads:
number i of the first key head, number i of the second one, and so on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_family import GgufFamily
from pdserve.model.config import ModelConfig
from pdserve.model.groups import Floats, Groups, joined_groups
from pdserve.model.state_design import GatedDelta
from pdserve.model.weights import GROUP, Part, Stored

Order = npt.NDArray[np.int64]
KERNELS = ("conv.conv.weight", "conv1d.weight")
QKV, Z, OUTPUT = "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.out_proj.weight"
QKVZ = "linear_attn.in_proj_qkvz"
OF_HEADS = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")  # with a row for each value head


def with_states(weights: Mapping[str, Stored], family: GgufFamily, config: ModelConfig) -> dict[str, Stored]:
    """Return weights under the same names as Hugging Face has them. ConfigError for one without its other part."""
    found = {name: _shaped(name, stored) for name, stored in weights.items()}
    mixers = (layer.attention for layer in config.design.layers)
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    if delta is not None and not delta.by_key_head and delta.shared > 1:
        found = {name: _by_key_head(name, stored, delta) for name, stored in found.items()}
    orders = {QKVZ: _qkvz(delta)} if delta is not None and delta.by_key_head else {}
    for whole, parts in family.joined.items():
        _join(found, whole, parts, orders.get(whole))
    return found


def _shaped(name: str, stored: Stored) -> Stored:
    """Return a tensor in the shape it has on Hugging Face, and a rate as its logarithm."""
    shape = stored.shape
    if name.endswith(".A_log"):
        return _changed(stored, (shape[0],), lambda values: np.log(-values))
    if name.endswith(KERNELS) and len(shape) == 2:
        return _changed(stored, (shape[0], 1, shape[1]))
    if name.endswith((".D", "norm.weight")) and len(shape) == 2:
        return _changed(stored, (shape[0] * shape[1],))
    return stored


def _changed(stored: Stored, shape: tuple[int, ...], change: Callable[[Floats], Floats] = np.copy) -> Stored:
    """Return all of a small tensor in another shape, with a change of its numbers."""

    def read(part: Part) -> Floats:
        return change(np.asarray(stored.read(()))).reshape(shape)[part]

    return Stored(shape, read)


def _by_key_head(name: str, stored: Stored, of: GatedDelta) -> Stored:
    """Return a tensor in which value heads that share a key head are neighbours."""
    if name.endswith(OUTPUT):
        read = _Inputs(stored, _tiled(of, of.value_dim), of.value_dim).read
        return replace(stored, read=read) if of.value_dim % GROUP == 0 else Stored(stored.shape, read)
    of_heads = "linear_attn." in name and name.endswith(OF_HEADS)
    if of_heads or name.endswith(Z):
        order = _tiled(of, 1 if of_heads else of.value_dim)
    elif name.endswith((QKV, "linear_attn.conv1d.weight")):
        keys = 2 * of.key_heads * of.key_dim
        order = np.concatenate((np.arange(keys), keys + _tiled(of, of.value_dim)))
    else:
        return stored
    return replace(stored, read=_Rows((stored,), order).read)


def _tiled(of: GatedDelta, width: int) -> Order:
    """Return where the file has each row of value heads, of so many rows each."""
    places = np.arange(of.value_heads * width, dtype=np.int64).reshape(of.shared, of.key_heads, width)
    return places.swapaxes(0, 1).reshape(-1)


def _qkvz(of: GatedDelta) -> Order:
    """Return where the file has the rows of q, k, v and z of each key head; there all of q come first, and so on."""
    keys, values = of.key_heads * of.key_dim, of.value_heads * of.value_dim
    places = np.split(np.arange(2 * (keys + values), dtype=np.int64), (keys, 2 * keys, 2 * keys + values))
    return np.concatenate([each.reshape(of.key_heads, -1) for each in places], axis=1).reshape(-1)


def _join(found: dict[str, Stored], whole: str, parts: tuple[str, ...], order: Order | None) -> None:
    """Put in place of the parts of a matrix that matrix, in each layer."""
    first = f".{parts[0]}.weight"
    for layer in [name.removesuffix(first) for name in found if name.endswith(first)]:
        names = [f"{layer}.{part}.weight" for part in parts]
        if missing := next((name for name in names if name not in found), None):
            raise ConfigError(f"{missing}: the file has no such tensor")
        stored = tuple([found.pop(name) for name in names])
        width = sum(each.shape[0] for each in stored)
        if len({each.shape[1:] for each in stored}) > 1 or (order is not None and len(order) != width):
            raise ConfigError(f"{names[0]}: shapes {[each.shape for each in stored]} are not those of {whole}")
        same = all(each.codes == stored[0].codes for each in stored)
        kept = stored[0] if same else Stored(stored[0].shape, stored[0].read)
        rows = _Rows(stored, order, keeps_codes=same)
        found[f"{layer}.{whole}.weight"] = replace(kept, shape=(width, *kept.shape[1:]), read=rows.read)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Reads the rows of several tensors one behind the other, or in another order."""

    parts: tuple[Stored, ...]
    order: Order | None = None
    keeps_codes: bool = True

    def read(self, part: Part) -> Floats | Groups:
        rows, *inputs = part or (slice(None),)
        found = [each.read((slice(None), *inputs)) for each in self.parts]
        wanted = rows if self.order is None else self.order[rows]
        coded = [each for each in found if isinstance(each, Groups)]
        if coded and len(coded) == len(found) and self.keeps_codes:
            return joined_groups(*coded).of_outputs(wanted)
        return np.concatenate([_values(each) for each in found])[wanted]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Reads a matrix whose inputs are in another order, by runs of neighbours. Runs of whole groups stay coded."""

    stored: Stored
    order: Order
    run: int

    def read(self, part: Part) -> Floats | Groups:
        rows, *inputs = part or (slice(None),)
        wanted = self.order[inputs[0]] if inputs else self.order
        found = self.stored.read((rows,))
        if isinstance(found, Groups):
            return found.of_groups(wanted[::GROUP] // GROUP) if self.run % GROUP == 0 else found.values()[:, wanted]
        return np.asarray(found)[:, wanted]


def _values(found: object) -> Floats:
    return found.values() if isinstance(found, Groups) else np.asarray(found)
