"""Steps that a GPU's runner computes before it serves, so that later ones find kernels compiled and memory taken."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from pdserve.base.ids import PageId
from pdserve.engine.attention_triton import graph_sizes
from pdserve.engine.batch import PoolShape
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
from pdserve.protocol.sampling import SamplingParams


def prompt_steps(max_tokens: int, max_model_len: int, pool: PoolShape) -> Iterator[StepPlan]:
    """Yield steps of prompts that between them compile and allocate what later ones need; all in page 0.

    One token sequence far into a context, whose keys are split; then prompts from short ones to the largest step.
    """
    yield _in_page_0([(max_model_len - min(2, max_model_len), min(2, max_model_len))], pool)
    for num_tokens in graph_sizes(max_tokens):
        whole, rest = divmod(num_tokens, max_model_len)
        yield _in_page_0([(0, max_model_len)] * whole + [(0, rest)] * (rest > 0), pool)


def _in_page_0(parts: Seq[tuple[int, int]], pool: PoolShape) -> StepPlan:
    """Return a step of chunks, each given as (start, tokens), with a sample each."""
    greedy = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), forbid_stops=False, sequence=(-1, 0))
    chunks = []
    for start, count in parts:
        first, *others = (
            (PageId(0),) * -(-(start + count) // size) for size in (pool.page_size, *pool.other_page_sizes)
        )
        chunks.append(Chunk((0,) * count, start, first, (greedy,), other_pages=tuple(others)))
    return StepPlan(tuple(chunks))
