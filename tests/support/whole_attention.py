"""The attention of all layers of a model, as a runner has it, planned for one batch."""

from torch import Tensor

from pdserve.engine.attention_torch import TorchAttention
from pdserve.engine.batch import Batch
from pdserve.engine.layer_kinds import ByLayer, by_layer, pool_shape
from pdserve.engine.runner import states_of
from pdserve.engine.step import StepPlan
from pdserve.model.family import Model
from pdserve.model.layer_groups import LayerGroup, layer_groups


def torch_attention(
    model: Model, kv: Tensor, plan: StepPlan, groups: tuple[LayerGroup, ...] | None = None
) -> ByLayer[TorchAttention]:
    """groups: of the pool; those of pages like the pool's unless given."""
    config = model.config
    groups = layer_groups(config, kv.shape[4]) if groups is None else groups
    make_states = states_of(model)
    attention = by_layer(lambda kind: TorchAttention(config, kind), model, kv, groups, make_states=make_states)
    batch = Batch.of(plan, pool_shape(config, len(kv), groups))
    for part, group in zip(attention.parts, attention.groups, strict=True):
        part.plan(batch.of_group(group))
    if attention.states is not None:
        attention.states.plan(batch.chains)
    return attention
