"""Which models several ranks may hold together, and what one of them has. Free of torch.

Refused is what no test has compared with one rank: see `tests/model/test_ranks.py`.
"""

from dataclasses import replace

from pdserve.base.errors import ConfigError
from pdserve.model.config import ModelConfig
from pdserve.model.state_design import GatedDelta, Recurrent, ShortConv, StateSpace
from pdserve.model.weights import Rank
from pdserve.settings.degrees import Degrees


def part_of(config: ModelConfig, rank: Rank) -> ModelConfig:
    """Return the config with the heads of one rank, which are those that it attends with."""
    if rank.size == 1:
        return config
    queries = rank.query_heads(config.num_heads, config.num_kv_heads)
    keys = rank.kv_heads(config.num_kv_heads)
    return replace(config, num_heads=queries.stop - queries.start, num_kv_heads=keys.stop - keys.start)


def check_divides(config: ModelConfig, degrees: Degrees) -> None:
    """Raise ConfigError unless so many ranks, or so many pipeline stages, serve a model."""
    size, num_stages = degrees.tensor, degrees.pipeline
    if num_stages > config.num_layers:
        raise ConfigError(f"pipeline_parallel_size: {num_stages}: the model has {config.num_layers} layers")
    if num_stages > 1 and config.has_states:
        raise ConfigError(f"pipeline_parallel_size: {num_stages}: layers with a state are not tried in stages yet")
    if num_stages > 1 and (kind := config.shared_between_layers):
        raise ConfigError(f"pipeline_parallel_size: {num_stages}: {kind} are not served in stages yet")
    if size == 1:
        return
    for recurrent in dict.fromkeys(config.design.recurrent):
        _check_recurrent(recurrent, size)
    if any(mixture.expert.inner_size % 2 for mixture in config.design.mixtures):
        raise _refusal(size, "an odd number of features of each expert is not divided between ranks yet")
    heads = config.num_heads
    for kv_heads in {own.num_kv_heads for own in config.kinds_of_heads}:
        divides = size % kv_heads == 0 if size > kv_heads else kv_heads % size == 0 or not config.has_unlike_heads
        if not divides or (heads % size and (size > kv_heads or config.has_unlike_heads)):
            raise _refusal(size, f"{heads} heads, {kv_heads} of them of keys and values, cannot be divided like this")


def check_state_parts(config: ModelConfig, num_ranks: int) -> None:
    """Raise ConfigError unless states can be divided by KV heads, and each rank has as many of these."""
    count = config.num_kv_heads
    if count % num_ranks:
        reason = f"{count} KV heads of a model with states are not divided evenly"
        raise _refusal(num_ranks, f"{reason} in memory of each rank's own")
    if not all(each is None or each.has_equal_parts(count) for each in config.design.recurrent):
        kind = f"a model whose states are not divided evenly by its {count} KV heads"
        raise ConfigError(f"rank_memory: own is not served for {kind}")


def _check_recurrent(of: Recurrent | StateSpace | None, size: int) -> None:
    """Raise ConfigError unless each of so many ranks has a part of a layer that keeps a state."""
    match of:
        case StateSpace(heads=heads, groups=groups):
            if size > groups and (size % groups or heads % size):
                raise _refusal(size, f"{heads} heads of states in {groups} groups cannot be divided like this")
            if of.has_wide_norm and of.norm_first:
                raise _refusal(size, "a norm of states before their gate is not divided between ranks yet")
            if of.eps is not None and groups > 1 and groups % size:
                raise _refusal(size, f"{groups} groups of states with a norm are not divided evenly")
        case GatedDelta(key_heads=count) if count < size:
            raise _refusal(size, f"{count} heads of keys of a delta net cannot be divided like this")
        case ShortConv(channels=count) if count < size:
            raise _refusal(size, f"{count} channels of a convolution cannot be divided like this")
        case _:
            return


def _refusal(size: int, reason: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size: {size}: {reason}")
