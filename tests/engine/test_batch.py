import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.engine.batch import Batch, PoolShape
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
from pdserve.protocol.sampling import SamplingParams

POOL = PoolShape(num_pages=50, page_size=4, vocab_size=100)


def samples(count: int) -> tuple[SampleSpec, ...]:
    params = SamplingParams()
    return tuple(SampleSpec(params, seed, 0, (), (), forbid_stops=False, sequence=(0, seed)) for seed in range(count))


def pages(*ids: int) -> tuple[PageId, ...]:
    return tuple(PageId(page) for page in ids)


def test_each_token_knows_its_position_and_its_place_in_the_pool() -> None:
    plan = StepPlan((Chunk((10, 11, 12), 3, pages(7, 9), ()), Chunk((20,), 0, pages(5), samples(1))))
    batch = Batch.of(plan, POOL)
    assert batch.order.tolist() == [1, 0]
    assert batch.token_ids.tolist() == [20, 10, 11, 12]
    assert batch.positions.tolist() == [0, 3, 4, 5]
    assert batch.pages.tolist() == [5, 7, 9, 9]
    assert batch.slots.tolist() == [0, 3, 0, 1]
    assert batch.query_starts.tolist() == [0, 1, 4]
    assert batch.kv_lens.tolist() == [1, 6]
    assert batch.page_table.tolist() == [[5, 5], [7, 9]]


def test_samples_are_drawn_from_the_last_token_as_often_as_asked() -> None:
    plan = StepPlan(
        (Chunk((1, 2), 0, pages(0), samples(3)), Chunk((3,), 0, pages(1), ()), Chunk((4,), 4, pages(2, 3), samples(1)))
    )
    batch = Batch.of(plan, POOL)
    assert batch.order.tolist() == [1, 2, 0]
    assert batch.sample_rows.tolist() == [1, 3, 3, 3]
    assert batch.sample_counts.tolist() == [0, 1, 3]
    assert [sample.seed for sample in batch.samples] == [0, 0, 1, 2]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    chunks = []
    for _ in range(draw(st.integers(1, 6))):
        start, length = draw(st.integers(0, 20)), draw(st.integers(1, 12))
        owned = draw(st.permutations(range(POOL.num_pages)))[: -(-(start + length) // POOL.page_size)]
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        chunks.append(Chunk(tokens, start, pages(*owned), samples(draw(st.integers(0, 2)))))
    return StepPlan(tuple(chunks))


@settings(deadline=None)
@given(plans())
def test_arrays_say_what_a_loop_over_tokens_says(plan: StepPlan) -> None:
    batch = Batch.of(plan, POOL)
    assert sorted(batch.order.tolist()) == list(range(len(plan.chunks)))
    for place, index in enumerate(batch.order):
        chunk = plan.chunks[index]
        tokens = slice(batch.query_starts[place], batch.query_starts[place + 1])
        assert batch.token_ids[tokens].tolist() == list(chunk.token_ids)
        positions = [chunk.start + i for i in range(len(chunk.token_ids))]
        assert batch.positions[tokens].tolist() == positions
        assert batch.pages[tokens].tolist() == [chunk.pages[p // POOL.page_size] for p in positions]
        assert batch.slots[tokens].tolist() == [p % POOL.page_size for p in positions]
        assert batch.kv_lens[place] == positions[-1] + 1
        assert batch.page_table[place, : len(chunk.pages)].tolist() == list(chunk.pages)
        assert set(batch.page_table[place, len(chunk.pages) :]) <= {chunk.pages[0]}
    assert np.all(np.diff(batch.query_lens) >= 0)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk((), 0, pages(1), ()),
        Chunk((1,), -1, pages(1), ()),
        Chunk((1,), 0, (), ()),
        Chunk((1,), 4, pages(1), ()),
        Chunk((1,), 0, pages(50), ()),
        Chunk((1,), 0, pages(-1), ()),
        Chunk((100,), 0, pages(1), ()),
        Chunk((-1,), 0, pages(1), ()),
        Chunk((1,), 0, pages(1), (), other_pages=(pages(2),)),
    ],
)
def test_a_plan_that_cannot_be_run_is_our_own_fault(chunk: Chunk) -> None:
    with pytest.raises(InvariantError):
        Batch.of(StepPlan((Chunk((1,), 0, pages(0), ()), chunk)), POOL)
