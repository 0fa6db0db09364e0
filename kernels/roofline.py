"""Estimate how fast a chip could do a kernel's work, from counted operations and bytes: not a measurement.

A kernel whose programs run one to a multiprocessor does its parts one after the other; with several, one program's
softmax runs beside another's matrix products. Between the two sums below lies what can be hoped for.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a chip's matrix units and memory can do."""

    name: str
    matrix_flops: float  # dense bf16 operations per second
    memory_bytes: float  # per second, reads plus writes
    exponentials: float  # per second
    vector_ops: float  # float32 operations per second outside the matrix units


@dataclass(frozen=True, slots=True)
class Work:
    """The least a kernel must do: each input read once, each output written once."""

    name: str
    flops: float
    bytes: float
    scores: float = 0  # of queries and keys: each is exponentiated once, and taken through SCORE_OPS more

    def best_time_s(self, chip: Ceilings) -> float:
        """Return the largest of the times that no version can beat: everything overlaps."""
        return max(self.flops / chip.matrix_flops, self.bytes / chip.memory_bytes, self.softmax_s(chip))

    def plain_time_s(self, chip: Ceilings) -> float:
        """Return the time if no softmax runs beside a matrix product."""
        return max(self.flops / chip.matrix_flops + self.softmax_s(chip), self.bytes / chip.memory_bytes)

    def softmax_s(self, chip: Ceilings) -> float:
        """Return the time for what lies between the two matrix products."""
        return self.scores / chip.exponentials + self.scores * SCORE_OPS / chip.vector_ops

    def bound(self, chip: Ceilings) -> str:
        """Say which of the two it is."""
        return "matrix" if self.flops / chip.matrix_flops > self.bytes / chip.memory_bytes else "memory"


SCORE_OPS = 5  # scale and subtract, maximum, sum, and two to narrow

# A matrix product on random data and a large device copy, as seen on H200s; the datasheet says 989e12, 4.8e12. The
# others by NVIDIA's tables for compute capability 9.0: 16 and 128 a clock on each of 132 multiprocessors, at 1.755 GHz.
H200 = Ceilings("H200", 790e12, 4.3e12, 16 * 132 * 1.755e9, 128 * 132 * 1.755e9)


def prefill(name: str, queries: int, keys: int, heads: tuple[int, int], head_dim: int) -> Work:
    """Count causal attention of the last `queries` of `keys` positions, bf16; heads: query, K/V."""
    pairs = queries * keys - queries * (queries - 1) / 2
    moved = 2 * head_dim * (2 * queries * heads[0] + 2 * keys * heads[1])
    return Work(name, 4 * pairs * heads[0] * head_dim, moved, pairs * heads[0])


def decode(name: str, batch: int, keys: int, width: int, heads: tuple[int, int]) -> Work:
    """Count one decode step of head_dim 128, bf16."""
    head_dim = 128
    moved = 2 * head_dim * batch * (2 * width * heads[0] + 2 * keys * heads[1])
    scores = batch * width * keys * heads[0]
    return Work(name, 4 * scores * head_dim, moved, scores)


def workloads() -> list[Work]:
    """List the shapes the project has goals for."""
    llama, shard = (64, 8), (8, 1)
    return [
        *(prefill(f"prefill {size} causal, 64/8 heads d128", size, size, llama, 128) for size in (2048, 8192, 16384)),
        prefill("prefill 256 of 131072, 8/1 heads d128", 256, 131072, shard, 128),
        *(decode(f"decode 32 x 8192, width {width}, 64/8 heads d128", 32, 8192, width, llama) for width in (1, 8, 16)),
        decode("decode 8 x 2048, 64/8 heads d128", 8, 2048, 1, llama),
        decode("decode 1 x 131072, 8/1 heads d128", 1, 131072, 1, shard),
        Work("rms norm 16384 x 4096 with residual", 0, 16384 * 4096 * 2 * 4),
        Work("silu mul 16384 x 14336", 0, 16384 * 14336 * 2 * 3),
    ]
