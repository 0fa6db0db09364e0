"""The random numbers are the published mixers, and make the distribution they are meant to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kernels import rng

LOW64 = (1 << 64) - 1
LOW32 = (1 << 32) - 1


def splitmix64(seed: int, index: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15 * (index + 1)) & LOW64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & LOW64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & LOW64
    return z ^ (z >> 31)


def lowbias32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW32
    return x ^ (x >> 16)


@given(st.lists(st.tuples(st.integers(0, LOW64), st.integers(0, 1 << 40)), min_size=1, max_size=8))
def test_keys_are_splitmix64_in_integer_arithmetic(pairs: list[tuple[int, int]]) -> None:
    words = rng.keys([seed for seed, _ in pairs], [index for _, index in pairs])
    assert [int(low) | int(high) << 32 for low, high in words] == [splitmix64(*pair) for pair in pairs]


def test_negative_seeds_are_their_two_complement() -> None:
    assert (rng.keys([-1], [0]) == rng.keys([LOW64], [0])).all()


def test_bits_are_two_rounds_of_lowbias32_in_integer_arithmetic() -> None:
    words = rng.keys([1, 2], [0, 7])
    ids = np.arange(0, 100_000, 7, dtype=np.uint32)
    for low, high in words.tolist():
        bits = rng.random_bits(np.array([low, high], dtype=np.uint32), ids)
        assert bits.tolist() == [lowbias32((lowbias32(i ^ low) + high) & LOW32) for i in ids.tolist()]


def test_uniforms_lie_strictly_between_zero_and_one() -> None:
    extremes = np.array([0, LOW32, 2**31 - 1, 2**31], dtype=np.uint32)
    assert rng.uniform(extremes).tolist() == [2.0**-33, 1 - 2.0**-24, 0.5, 0.5]


def test_the_noise_of_chosen_ids_is_the_noise_of_the_whole_vocabulary() -> None:
    (key,), ids = rng.keys([5], [1]), np.array([3, 99_999, 50_000, 1], dtype=np.uint32)
    assert (rng.gumbel(key, np.arange(100_000, dtype=np.uint32))[ids] == rng.gumbel(key, ids)).all()


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = rng.gumbel(rng.keys([1], [0])[0], np.arange(1_000_000, dtype=np.uint32)).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772, abs=4e-3)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=1.2e-2)


@pytest.mark.parametrize("bad", [np.zeros((1, 2), dtype=np.uint32), np.zeros(2, dtype=np.int32)])
def test_keys_of_the_wrong_shape_or_type_are_refused(bad: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> None:
    with pytest.raises(ValueError, match="key and ids must be uint32"):
        rng.random_bits(bad, np.arange(10, dtype=np.uint32))
