"""Pages that a worker of one type of K and V hands to one of another go on there as rows that were rounded there."""

from itertools import permutations

import pytest
import torch
from greedy_runs import spec
from small_models import small_config, small_model

from pdserve.base.ids import PageId
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.layouts import describe_layout
from pdserve.kvtransfer.conversion import conversion_between
from pdserve.model.family import Model
from pdserve.protocol.kvlayout import KvCode, KvLayout
from pdserve.protocol.sampling import SamplingParams

VOCAB, LENGTH = 90, 70
TOKENS = [(7 * i + 3 * LENGTH) % VOCAB for i in range(LENGTH)]
CODES: tuple[KvCode | None, ...] = (None, "int8", "fp8_e4m3")
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def layout(model: Model, page_size: int, code: KvCode | None) -> KvLayout:
    return describe_layout(model.config, "", page_size, code or TYPES[model.dtype], "cpu")


def computed(model: Model, page_size: int, code: KvCode | None) -> torch.Tensor:
    """Return the pages of a prompt that a worker has computed in two chunks, as bytes."""
    count = -(-LENGTH // page_size)
    runner, pages = Runner(model, count, page_size, code=code), [PageId(page) for page in range(count)]
    runner.kv.zero_()
    for start in (0, 33):
        chunk = TOKENS[start : 33 if start == 0 else LENGTH]
        runner.run(StepPlan((Chunk(chunk, start, pages, (spec(),) if start else ()),)))
    return runner.kv.flatten(1).view(torch.uint8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_what_is_handed_over_is_bit_by_bit_what_the_receiver_would_have_written(
    dtype: torch.dtype, page_size: int, code: KvCode
) -> None:
    # With one layer, no attention over rounded rows comes before the rows that are compared.
    model = small_model(small_config(VOCAB, num_hidden_layers=1), dtype)
    conversion = conversion_between(layout(model, page_size, None), layout(model, page_size, code))
    assert conversion is not None
    assert torch.equal(conversion.of(computed(model, page_size, None)), computed(model, page_size, code))


@pytest.mark.parametrize(("source", "target"), [*permutations(CODES, 2)])
def test_the_receiver_goes_on_from_the_rounded_rows(source: KvCode | None, target: KvCode | None) -> None:
    model, page_size = small_model(small_config(VOCAB)), 16
    conversion = conversion_between(*(layout(model, page_size, code) for code in (source, target)))
    assert conversion is not None
    handed = conversion.of(computed(model, page_size, source))
    own, params = computed(model, page_size, target), SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    receiver, pages = Runner(model, len(own), page_size, code=target), [PageId(page) for page in range(len(own))]
    likeliest = []
    for arrived in (handed, own, own.roll(1, 0)):
        receiver.kv.flatten(1).view(torch.uint8).copy_(arrived)
        drawn = receiver.run(StepPlan((Chunk([11], LENGTH, pages, (spec((), params),)),))).tokens[0][0][0]
        assert drawn.logprobs is not None
        likeliest.append(dict(drawn.logprobs.top))
    near, far = (distance(likeliest[which], likeliest[1]) for which in (0, 2))
    assert 2 * near < far, "other pages would be seen"


def distance(these: dict[int, float], those: dict[int, float]) -> float:
    """Return how far log probabilities are apart at most. What one does not name is below all that it names."""
    return max(abs(these.get(token, min(these.values())) - value) for token, value in those.items())
