"""What layers consist of that keep a state of a sequence, whose size does not depend on its length. Free of torch.

`state_parts` counts float32 values: of the last inputs of a convolution, and of a memory where there is one. `changes`
counts those by which a token changes the memory: keys, and of each head what it learns and how much is left.
`products` counts those of a token with each other one that is computed at once, and `keys` the features of each factor.
`token_values` counts what a token needs while its layer is computed: values of the model's type, and of float32.
"""

from dataclasses import dataclass

MOST_KEYS = 2048  # features of a head's keys: compiled kernels keep some of their memory on a thread's stack


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A convolution over each feature of the last tokens, between two gates (LFM2, 2025). It has no attention."""

    channels: int
    kernel: int  # tokens
    bias: bool = False

    @property
    def state_parts(self) -> tuple[int, ...]:
        return (self.channels * (self.kernel - 1),)

    @property
    def changes(self) -> int:
        return 0

    @property
    def products(self) -> int:
        return 0

    @property
    def keys(self) -> int:
        return 0

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
    def channels(self) -> int:
        """Return how many features are convolved."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_parts(self) -> tuple[int, ...]:
        return self.channels * (self.kernel - 1), self.value_heads * self.key_dim * self.value_dim

    @property
    def changes(self) -> int:
        return self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)

    @property
    def products(self) -> int:
        return 2 * self.value_heads

    @property
    def keys(self) -> int:
        return self.key_dim

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

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return how many features are convolved."""
        return self.inner_size + 2 * self.groups * self.state_dim

    @property
    def state_parts(self) -> tuple[int, ...]:
        return self.channels * (self.kernel - 1), self.inner_size * self.state_dim

    @property
    def changes(self) -> int:
        return self.groups * self.state_dim + self.heads * (self.head_dim + 1)

    @property
    def products(self) -> int:
        return self.heads

    @property
    def keys(self) -> int:
        return self.state_dim

    @property
    def token_values(self) -> tuple[int, int]:
        taken = self.inner_size + self.channels + self.heads  # and scaled
        return 2 * taken + self.inner_size, self.channels + self.inner_size


Recurrent = ShortConv | GatedDelta  # which have no attention
