"""How much of a GPU's memory a model's steps take, and how many pages fit beside them."""

import gc
from dataclasses import dataclass, replace

import torch

from pdserve.engine.sampler import SCORING_BYTES
from pdserve.engine.scheduler import Limits
from pdserve.engine.states_triton import states_spec
from pdserve.kernels.attention import PARTIALS_BYTES
from pdserve.model.family import Model
from pdserve.model.layer_groups import layer_groups
from pdserve.model.rope import distinct

LIBRARY_BYTES = 192 << 20  # of libraries' workspaces, on the two streams that launch: an assumption, never measured
GROUP_BYTES = 1 << 30  # of NCCL's buffers between ranks: an assumption, never measured
CONTEXT_BYTES = 1 << 30  # of CUDA's context and libraries in a process, at most: an assumption, never measured
SAMPLING_BYTES = 8  # per logit: a count of penalties, and a score
GRAPH_SHARE = 2  # the captured sizes are powers of two: together less than twice the largest


def most_samples(limits: Limits) -> int:
    """Return how many rows a step samples at most: of each sequence its last token, and guesses behind it."""
    return max(limits.max_num_seqs, min(limits.max_num_seqs * limits.most_rows, limits.max_num_batched_tokens))


def step_bytes(model: Model, limits: Limits) -> int:
    """Return what the largest step and all captured ones take at most, beside weights and pages.

    An upper estimate from shapes: no step is run to measure it.
    """
    config, per_token, element_bytes = model.config, model.activation_bytes(), model.dtype.itemsize
    num_rows = most_samples(limits)
    logits = config.vocab_size * (element_bytes + SAMPLING_BYTES)
    captured = GRAPH_SHARE * num_rows * (per_token + config.vocab_size * element_bytes)
    num_kinds = len({each.scores for each in config.design.attentions if each is not None})
    angles = len(distinct(model.ropes)[0]) * limits.max_model_len * config.rope_dim * 4
    fixed = SCORING_BYTES + num_kinds * (PARTIALS_BYTES + angles) + LIBRARY_BYTES
    if model.rank.size > 1:
        fixed += GROUP_BYTES + (1 + GRAPH_SHARE) * num_rows * config.vocab_size * element_bytes  # as they are gathered
    if config.has_states:
        *_, states = layer_groups(config, 1, powers_of_two=True)  # larger pages have fewer ends
        most = max(limits.max_num_batched_tokens, num_rows), num_rows
        parts = model.rank.kv_heads(config.num_state_parts)
        fixed += states_spec(config, states.page_size, most, parts.stop - parts.start).kept_bytes
    return limits.max_num_batched_tokens * per_token + num_rows * logits + captured + fixed


def head_bytes(model: Model, limits: Limits) -> int:
    """Return what a head beside a model takes at most, beside its weights: it is a layer of the model's width.

    It takes in as many tokens as a step has, and its passes have a row of each sequence.
    """
    captured = GRAPH_SHARE * most_samples(limits) * model.activation_bytes()
    return step_bytes(model, replace(limits, num_speculative_tokens=0)) + captured


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU, which other processes may use as well."""

    total: int
    free: int
    reserved: int  # by torch in this process

    @classmethod
    def of(cls, device: torch.device) -> "GpuMemory":
        """Return those of a GPU, once torch has given back what it only keeps for later."""
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))

    @property
    def own(self) -> int:
        """What this process has, at most: nobody says how much CUDA's context and libraries take."""
        return min(self.total - self.free, self.reserved + CONTEXT_BYTES)

    def pages_that_fit(self, utilization: float, step_bytes: int, page_bytes: int) -> int:
        """Return how many pages fit into this process's share beside what it has and a step; 0 if none does."""
        room = min(int(self.total * utilization) - self.own, self.free) - step_bytes
        return max(0, room) // page_bytes
