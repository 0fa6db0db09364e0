"""The attention of all layers of a model through Triton's kernels, as a runner has it, planned for one batch."""

from collections.abc import Sequence as Seq
from functools import partial

from torch import Tensor

from pdserve.engine.attention_triton import TritonAttention
from pdserve.engine.batch import Batch
from pdserve.engine.layer_kinds import ByLayer, by_layer, pool_shape
from pdserve.engine.states_triton import TritonStates
from pdserve.engine.step import StepPlan
from pdserve.engine.step_inputs import step_inputs
from pdserve.kernels.staging import Staging
from pdserve.model.family import Model
from pdserve.model.layer_groups import LayerGroup, layer_groups


def triton_attention(
    model: Model,
    kv: Tensor,
    plan: StepPlan,
    limits: tuple[int, Seq[int]],
    room: int = 0,
    groups: tuple[LayerGroup, ...] | None = None,
) -> tuple[Tensor, ByLayer[TritonAttention]]:
    """Return token ids and attention. limits: the longest context, and the sizes of decode steps; room: of padding."""
    config = model.config
    groups = layer_groups(config, kv.shape[4]) if groups is None else groups
    make_states = partial(TritonStates, config, (plan.num_tokens + room, 1))
    attention = by_layer(
        lambda kind: TritonAttention(config, *limits, None, kind), model, kv, groups, make_states=make_states
    )
    pool = pool_shape(config, len(kv), groups)
    batch = Batch.of(plan, pool)
    token_ids, positions, *slots = Staging(kv.device).send(*step_inputs(batch, pool, batch.num_tokens + room))
    for part, group in zip(attention.parts, attention.groups, strict=True):
        part.plan(batch.of_group(group), positions, slots[group])
    if attention.states is not None:
        attention.states.plan(batch.chains)
    return token_ids, attention
