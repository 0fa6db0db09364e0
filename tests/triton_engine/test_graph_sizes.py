"""Which size a decode step takes, and what stands in its buffers."""

import numpy as np
import pytest
import torch
from greedy_runs import spec

from pdserve.base.ids import PageId
from pdserve.engine.attention_triton import graph_sizes, size_for
from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.replays import Replays
from pdserve.engine.step import Chunk, StepPlan
from pdserve.engine.step_inputs import step_inputs
from pdserve.kernels.staging import Staging, aligned

PAGE_SIZE, NUM_PAGES = 16, 20
CPU = torch.device("cpu")
POOL = PoolShape(NUM_PAGES, PAGE_SIZE, 200)


def decode_batch(*contexts: int) -> Batch:
    """Return a step that adds one token to each context; context i lies in pages from 4 * i on."""
    chunks = tuple(
        Chunk((100 + i,), length, tuple(PageId(4 * i + j) for j in range(length // PAGE_SIZE + 1)), (spec(),))
        for i, length in enumerate(contexts)
    )
    return Batch.of(StepPlan(chunks), POOL)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (11, (1, 2, 4, 8, 11)), (3, (1, 2, 3))]
)
def test_sizes_double_up_to_the_largest_step(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    sizes = graph_sizes(11)
    assert [size_for(count, sizes) for count in (1, 2, 3, 5, 8, 9, 11, 12)] == [1, 2, 4, 8, 8, 11, 11, None]


def test_padding_writes_to_no_slot() -> None:
    nowhere = NUM_PAGES * PAGE_SIZE
    assert [row.tolist() for row in step_inputs(decode_batch(3, 17), POOL, 5)] == [
        [100, 101, 0, 0, 0],
        [3, 17, 0, 0, 0],
        [3, 5 * PAGE_SIZE + 1, nowhere, nowhere, nowhere],
    ]


def test_a_later_step_of_a_size_is_found_where_the_first_one_was() -> None:
    staging = Staging(CPU, 3 * aligned(16))
    first = staging.send(*step_inputs(decode_batch(3, 17, 9), POOL, 4))
    addresses = [tensor.data_ptr() for tensor in first]
    staging.send(*step_inputs(decode_batch(3), POOL, 1))
    second = staging.send(*step_inputs(decode_batch(5, 6), POOL, 4))
    assert [tensor.data_ptr() for tensor in second] == addresses
    assert [tensor.tolist() for tensor in first[:2]] == [[100, 101, 0, 0], [5, 6, 0, 0]]
    assert all(address % 64 == 0 for address in (a - addresses[0] for a in addresses))


def test_what_is_sent_keeps_its_shape_and_kind_and_without_words_its_place() -> None:
    whole, parts = np.arange(6).reshape(2, 3), np.array([0.5, -1.0], dtype=np.float32)
    staging = Staging(CPU)
    first, halves = staging.send(whole, parts)
    assert (first.tolist(), first.dtype) == (whole.tolist(), torch.int32)
    assert (halves.tolist(), halves.dtype) == ([0.5, -1.0], torch.float32)
    staging.send(whole + 1, parts)
    assert first.tolist() == whole.tolist()


def test_arrays_larger_than_their_words_are_refused() -> None:
    with pytest.raises(ValueError, match="16 words"):
        Staging(CPU, 16).send(np.arange(17))


def test_on_a_cpu_every_step_is_computed_anew() -> None:
    replays, results = Replays(CPU), iter((torch.ones(1), torch.zeros(1)))
    assert [replays.run(1, lambda: next(results)).item() for _ in range(2)] == [1.0, 0.0]
