"""A program's threads do each piece of each call once, and no call before the one before it is done."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from pdserve.kernels.cpu.calls import WORTH_TEAM, Calls, Immediate, Program
from pdserve.kernels.cpu.layers import Tiles, multiply, rms_norm, tiled_codes

WIDTH = 256
MOST_ROWS = 24
DEPTH = 12
NORM = torch.ones(WIDTH)


@cache  # calls know only where weights lie
def tiles(seed: int) -> Tiles:
    draw = torch.Generator().manual_seed(seed)
    shape = (WIDTH, WIDTH // 32)
    codes = torch.randint(0, 256, (*shape, 32), generator=draw, dtype=torch.uint8)
    scales = torch.rand(shape, generator=draw).half() / 128
    return Tiles(tiled_codes(codes, scales, -scales * 128), 8, WIDTH, torch.float32)


def computed(calls: Calls, x: torch.Tensor, matrices: list[Tiles]) -> torch.Tensor:
    """Go through matrices one after the other; each result needs all of the one before it."""
    for matrix in matrices:
        x = multiply(calls, rms_norm(calls, x, NORM, 1e-5), matrix, x)
    return x


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_and_rows_gives_the_bits_of_calls_one_by_one(
    loaded: ctypes.CDLL, num_threads: int
) -> None:
    matrices = [tiles(seed) for seed in range(DEPTH)]
    given = torch.randn(MOST_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = computed(Immediate(loaded), given.clone(), matrices)
    program, x, before = Program(loaded), given.clone(), torch.get_num_threads()
    out = computed(program, x, matrices)
    try:
        torch.set_num_threads(num_threads)
        for turn in range(150):
            num_rows = 1 + turn % MOST_ROWS
            x.copy_(given)
            program.run(num_rows)
            assert torch.equal(out[:num_rows], expected[:num_rows])
            assert torch.equal(out[num_rows:], given[num_rows:])
    finally:
        torch.set_num_threads(before)


@dataclass
class Recorded:
    """A program of so many products and norms, and what it is to bring."""

    program: Program
    x: torch.Tensor
    given: torch.Tensor
    out: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, loaded: ctypes.CDLL, num_rows: int, depth: int) -> "Recorded":
        matrices = [tiles(seed) for seed in range(depth)]
        given = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(depth))
        expected = torch.cat([computed(Immediate(loaded), part.clone(), matrices) for part in given.split(MOST_ROWS)])
        program, x = Program(loaded), given.clone()
        return cls(program, x, given, computed(program, x, matrices), expected)

    def brings_it(self) -> bool:
        self.x.copy_(self.given)
        self.program.run(len(self.given))
        return torch.equal(self.out, self.expected)


@pytest.fixture
def _five_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_five_threads")
def test_programs_of_different_length_and_calls_over_many_rows_take_turns(loaded: ctypes.CDLL) -> None:
    programs = [Recorded.of(loaded, WORTH_TEAM, depth) for depth in (DEPTH, 1)]
    at_once, matrices = Immediate(loaded), [tiles(0)]
    for turn in range(200):
        torch.set_num_threads(5 - turn // 50)
        assert programs[0].brings_it()
        assert torch.equal(computed(at_once, programs[1].given.clone(), matrices), programs[1].expected)
        assert programs[1].brings_it()


@pytest.mark.usefixtures("_five_threads")
def test_threads_that_run_programs_at_the_same_moment_share_no_helpers(loaded: ctypes.CDLL) -> None:
    programs = [Recorded.of(loaded, num_rows, DEPTH) for num_rows in (MOST_ROWS, 3)]

    def run(recorded: Recorded) -> bool:
        torch.set_num_threads(5)  # of this thread
        return all(recorded.brings_it() for _ in range(300))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, programs)) == [True, True]


def test_memory_is_used_again_once_nobody_holds_it(loaded: ctypes.CDLL) -> None:
    program = Program(loaded)
    first, second = (program.empty(4, 8, torch.float32) for _ in range(2))
    address = first.data_ptr()
    assert address != second.data_ptr()
    del first
    assert program.empty(4, 8, torch.bfloat16).data_ptr() != address
    assert program.empty(4, 8, torch.float32).data_ptr() == address
