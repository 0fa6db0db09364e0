"""Estimate how fast a chip could do a kernel's work at best, from counted operations and bytes: not a measurement."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a chip's matrix units and memory can do."""

    name: str
    matrix_flops: float  # dense bf16 operations per second
    memory_bytes: float  # per second, reads plus writes


@dataclass(frozen=True, slots=True)
class Work:
    """The least a kernel must do: each input read once, each output written once."""

    name: str
    flops: float
    bytes: float

    def best_time_s(self, chip: Ceilings) -> float:
        """Return the larger of the two times that no version can beat."""
        return max(self.flops / chip.matrix_flops, self.bytes / chip.memory_bytes)

    def bound(self, chip: Ceilings) -> str:
        """Say which of the two it is."""
        return "matrix" if self.flops / chip.matrix_flops > self.bytes / chip.memory_bytes else "memory"


# A matrix product on random data and a large device copy, as seen on lent machines; the datasheet says 989e12, 4.8e12.
H200 = Ceilings("H200", 790e12, 4.3e12)


def prefill(name: str, queries: int, keys: int, heads: tuple[int, int], head_dim: int) -> Work:
    """Count causal attention of the last `queries` of `keys` positions, bf16; heads: query, K/V."""
    pairs = queries * keys - queries * (queries - 1) / 2
    moved = 2 * head_dim * (2 * queries * heads[0] + 2 * keys * heads[1])
    return Work(name, 4 * pairs * heads[0] * head_dim, moved)


def decode(name: str, batch: int, keys: int, width: int, heads: tuple[int, int]) -> Work:
    """Count one decode step of head_dim 128, bf16."""
    head_dim = 128
    moved = 2 * head_dim * batch * (2 * width * heads[0] + 2 * keys * heads[1])
    return Work(name, 4 * batch * width * keys * heads[0] * head_dim, moved)


def workloads() -> list[Work]:
    """List the shapes the project has goals for."""
    llama, shard = (64, 8), (8, 1)
    return [
        *(prefill(f"prefill {size} causal, 64/8 heads d128", size, size, llama, 128) for size in (2048, 8192, 16384)),
        prefill("prefill 256 of 131072, 8/1 heads d128", 256, 131072, shard, 128),
        *(decode(f"decode 32 x 8192, width {width}, 64/8 heads d128", 32, 8192, width, llama) for width in (1, 8, 16)),
        decode("decode 1 x 131072, 8/1 heads d128", 1, 131072, 1, shard),
        Work("rms norm 16384 x 4096 with residual", 0, 16384 * 4096 * 2 * 4),
        Work("silu mul 16384 x 14336", 0, 16384 * 14336 * 2 * 3),
    ]
