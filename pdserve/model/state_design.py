"""What layers consist of that keep a state of a sequence, whose size does not depend on its length. Free of torch.

`token_values` counts what a token needs while its layer is computed: values of the model's type, and of float32.

`of_rank` is what one of several ranks computes, and `runs` are the convolved features of that: of whole heads, and of
the keys that they share. A state lies in pages as one rank has it, so hand-offs do not depend on the number of ranks.
Where each rank has memory of its own, a page holds one part of a state behind each KV head, as if there were as many
ranks as KV heads (`ModelConfig.num_state_parts`).
"""

from dataclasses import dataclass, replace
from typing import Self

from pdserve.model.weights import ROWS, Rank, Shard

MOST_KEYS = 2048  # features of a head's keys: compiled kernels keep some of their memory on a thread's stack


@dataclass(frozen=True, slots=True)
class StateSizes:
    """How many float32 values a state has, and what changes it."""

    inputs: int  # the last ones of a convolution
    memory: int = 0
    changes: int = 0  # by which a token changes the memory: keys, and of each head what it learns and how much is left
    products: int = 0  # of a token with each other one that is computed at once
    keys: int = 0  # features of each factor of these

    @property
    def state(self) -> int:
        return self.inputs + self.memory


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A convolution over each feature of the last tokens, between two gates (LFM2, 2025). It has no attention."""

    channels: int
    kernel: int  # tokens
    bias: bool = False
    group: int = 1  # channels that ranks do not part, as they share a scale

    def has_equal_parts(self, count: int) -> bool:
        """Say whether it can be divided into so many parts that are alike."""
        return self.channels % (count * self.group) == 0

    def of_rank(self, rank: Rank) -> Self:
        (run,) = self.runs(rank)
        return replace(self, channels=run.stop - run.start)

    def heads_before(self, rank: Rank) -> int:
        """Return how many heads are of ranks before this one."""
        del rank
        return 0

    def runs(self, rank: Rank) -> tuple[slice, ...]:
        return (_span(rank, "channels", self.channels, self.group),)

    @property
    def sizes(self) -> StateSizes:
        return StateSizes(self.channels * (self.kernel - 1))

    @property
    def token_values(self) -> tuple[int, int]:
        return 4 * self.channels, 0


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A gated delta net (Yang, Kautz, Hatamizadeh 2024), after a convolution of q, k and v. It has no attention."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens
    eps: float  # of the norm of each head's result
    by_key_head: bool  # the file has two matrices in the place of four, whose rows come by key head

    @property
    def shared(self) -> int:
        """Return how many heads have the same keys."""
        return self.value_heads // self.key_heads

    def has_equal_parts(self, count: int) -> bool:
        return self.key_heads % count == 0

    def of_rank(self, rank: Rank) -> Self:
        heads = self.keys_of(rank)
        count = heads.stop - heads.start
        return replace(self, key_heads=count, value_heads=count * self.shared)

    def keys_of(self, rank: Rank) -> slice:
        """Return which heads of keys are a rank's."""
        return _span(rank, "heads of keys", self.key_heads)

    def heads_before(self, rank: Rank) -> int:
        first: int = self.keys_of(rank).start
        return first * self.shared

    def runs(self, rank: Rank) -> tuple[slice, ...]:
        heads, keys = self.keys_of(rank), self.key_heads * self.key_dim
        q, v = _scaled(heads, self.key_dim), _scaled(heads, self.shared * self.value_dim)
        return q, moved(q, keys), moved(v, 2 * keys)

    @property
    def channels(self) -> int:
        """Return how many features are convolved."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def sizes(self) -> StateSizes:
        return StateSizes(
            inputs=self.channels * (self.kernel - 1),
            memory=self.value_heads * self.key_dim * self.value_dim,
            changes=self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1),
            products=2 * self.value_heads,
            keys=self.key_dim,
        )

    @property
    def token_values(self) -> tuple[int, int]:
        width = self.value_heads * self.value_dim
        return self.channels + 2 * width + 2 * self.value_heads, self.channels + width


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 (Dao, Gu 2024): heads that forget at a rate of their own, after a convolution of x, B and C."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int  # of heads that share B and C
    kernel: int  # tokens
    conv_bias: bool
    eps: float | None  # of a norm of each group's result; None: there is none
    norm_first: bool  # the norm comes before the gate
    input_scale: float = 1.0
    scales: tuple[float, ...] = (1.0,) * 5  # of the gate, x, B, C and the step
    block: str = "mamba"  # within a layer

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def has_wide_norm(self) -> bool:
        """Say whether a norm is over all heads: several ranks add for it."""
        return self.eps is not None and self.groups == 1

    def has_equal_parts(self, count: int) -> bool:
        is_normed_apart = self.eps is None or (self.has_wide_norm and not self.norm_first)
        shares_groups = count % self.groups == 0 and is_normed_apart
        return self.heads % count == 0 and (self.groups % count == 0 or shares_groups)

    def of_rank(self, rank: Rank) -> Self:
        heads, groups = self.heads_of(rank), rank.kv_heads(self.groups)
        return replace(self, heads=heads.stop - heads.start, groups=groups.stop - groups.start)

    def heads_of(self, rank: Rank) -> slice:
        """Return which heads are a rank's; where there are fewer groups than ranks, several have the same one."""
        return rank.query_heads(self.heads, self.groups)

    def heads_before(self, rank: Rank) -> int:
        first: int = self.heads_of(rank).start
        return first

    def runs(self, rank: Rank) -> tuple[slice, ...]:
        x, b = _scaled(self.heads_of(rank), self.head_dim), _scaled(rank.kv_heads(self.groups), self.state_dim)
        return x, moved(b, self.inner_size), moved(b, self.inner_size + self.groups * self.state_dim)

    @property
    def channels(self) -> int:
        """Return how many features are convolved."""
        return self.inner_size + 2 * self.groups * self.state_dim

    @property
    def sizes(self) -> StateSizes:
        return StateSizes(
            inputs=self.channels * (self.kernel - 1),
            memory=self.inner_size * self.state_dim,
            changes=self.groups * self.state_dim + self.heads * (self.head_dim + 1),
            products=self.heads,
            keys=self.state_dim,
        )

    @property
    def token_values(self) -> tuple[int, int]:
        taken = self.inner_size + self.channels + self.heads  # and scaled
        return 2 * taken + self.inner_size, self.channels + self.inner_size


Recurrent = ShortConv | GatedDelta  # which have no attention


def _span(rank: Rank, name: str, length: int, unit: int = 1) -> slice:
    return Shard(ROWS, rank.index, rank.size, unit).span(name, length)


def _scaled(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


def moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
