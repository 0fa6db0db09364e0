"""Which size a decode step takes, and what stands in its buffers."""

import numpy as np
import pytest
import torch
from greedy_runs import spec

from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.graphs import Replays, StepInputs, graph_sizes, lay_out, size_for
from pdserve.engine.step import Chunk, StepPlan
from pdserve.errors import InvariantError
from pdserve.ids import PageId

PAGE_SIZE, NUM_PAGES = 16, 20
CPU = torch.device("cpu")


def decode_batch(*contexts: int) -> Batch:
    """Return a step that adds one token to each context; context i lies in pages from 4 * i on."""
    chunks = tuple(
        Chunk((100 + i,), length, tuple(PageId(4 * i + j) for j in range(length // PAGE_SIZE + 1)), (spec(),))
        for i, length in enumerate(contexts)
    )
    return Batch.of(StepPlan(chunks), PoolShape(NUM_PAGES, PAGE_SIZE, 200))


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (11, (1, 2, 4, 8, 11)), (3, (1, 2, 3))]
)
def test_sizes_double_up_to_the_largest_step(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    sizes = graph_sizes(11)
    assert [size_for(count, sizes) for count in (1, 2, 3, 5, 8, 9, 11, 12)] == [1, 2, 4, 8, 8, 11, 11, None]


def test_places_without_a_sequence_write_to_no_slot() -> None:
    image = np.full((3, 5), 77, np.int32)
    lay_out(decode_batch(3, 17), PAGE_SIZE, NUM_PAGES, image)
    nowhere = NUM_PAGES * PAGE_SIZE
    assert image.tolist() == [
        [100, 101, 0, 0, 0],
        [3, 17, 0, 0, 0],
        [3, 5 * PAGE_SIZE + 1, nowhere, nowhere, nowhere],
    ]


def test_a_later_step_of_a_size_is_found_where_the_first_one_was() -> None:
    inputs = StepInputs(16, PAGE_SIZE, NUM_PAGES, CPU)
    first = inputs.send(decode_batch(3, 17, 9), 4)
    addresses = [tensor.data_ptr() for tensor in first]
    inputs.send(decode_batch(3), 1)
    second = inputs.send(decode_batch(5, 6), 4)
    assert [tensor.data_ptr() for tensor in second] == addresses
    assert [tensor.tolist() for tensor in first[:2]] == [[100, 101, 0, 0], [5, 6, 0, 0]]
    assert all(address % 64 == 0 for address in (a - addresses[0] for a in addresses))


def test_a_step_larger_than_its_buffers_is_our_own_fault() -> None:
    with pytest.raises(InvariantError, match="17 tokens in buffers for 16"):
        StepInputs(16, PAGE_SIZE, NUM_PAGES, CPU).send(decode_batch(3), 17)


def test_on_a_cpu_every_step_is_computed_anew() -> None:
    replays, results = Replays(CPU), iter((torch.ones(1), torch.zeros(1)))
    assert [replays.run(1, lambda: next(results)).item() for _ in range(2)] == [1.0, 0.0]
