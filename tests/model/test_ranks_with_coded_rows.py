"""Ranks and stages that keep K and V in a byte a value compute in float32 what one rank with such rows computes.

Another order of sums may change a code by one, so tokens count up to the first one with a small lead.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from greedy_runs import BEST_TWO, Text, continued, greedy_texts, spec
from long_cases import long
from model_zoo import MORE_FAMILIES, STATES, prompt
from noted_programs import has_bfloat16_products, note_program_rows
from thread_ranks import PAGE_SIZE, thread_ranks

from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import Checkpoint, in_form
from pdserve.engine import runner as runner_module
from pdserve.engine.offline import TIED_CODED
from pdserve.engine.runner import EngineRunner, Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.layouts import describe_layout
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.kvtransfer.conversion import conversion_between
from pdserve.model.config import ModelConfig
from pdserve.model.loading import load_model
from pdserve.model.weights import Weights
from pdserve.protocol.kvlayout import KvCode
from pdserve.settings.degrees import Degrees

NUM_PAGES, NUM_TOKENS, CHUNK = 90, 10, 37
PROMPTS = [prompt(count, count) for count in (5, 45, 150, 16, 80, 31)]
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
LLAMA = "llama3"
CODES: tuple[KvCode, ...] = ("int8", "fp8_e4m3")
REFUSED = {
    "deepseek-v2",
    "deepseek-v2-groups",
    "deepseek-v3",
    "gemma4",
    "gemma4-moe",
    "gemma4-shared",
    "glm4-lite",
    "llama4",
    "ministral3",
}
FAMILIES = sorted({*MORE_FAMILIES, LLAMA, "mistral"} - {*STATES} - REFUSED)
TWO, STAGES = Degrees(2), Degrees(1, 2)
# What two ranks change of the lead of a token, over all families: up to 1.8e-2, of Gemma 5.3e-2.
TIED_ANYWHERE = 5e-2
FLAT = {LLAMA, "mistral"}  # no token leads by much, and ranks changed up to 4e-4 of it

pytestmark = pytest.mark.usefixtures("one_thread")


def texts(config: ModelConfig, weights: Weights, degrees: Degrees, code: KvCode) -> list[Text]:
    def of(runner: EngineRunner) -> list[Text]:
        return continued(runner, PROMPTS, NUM_TOKENS, CHUNK, BEST_TWO)

    if degrees.num_ranks == 1:
        return of(Runner(load_model(config, weights, torch.float32), NUM_PAGES, PAGE_SIZE, code=code))
    with thread_ranks(degrees, config, weights, torch.float32, NUM_PAGES, code) as ranks:
        return of(ranks)


def assert_ranks_are_as_one(
    config: ModelConfig, weights: Weights, degrees: Degrees, code: KvCode, tied: float = TIED_CODED
) -> None:
    found, right = (texts(config, weights, each, code) for each in (degrees, Degrees()))
    num_sure = [each.num_sure(tied) for each in right]
    answers = [[each.answer[:count] for each, count in zip(of, num_sure, strict=True)] for of in (found, right)]
    assert answers[0] == answers[1]
    assert sum(num_sure) > len(PROMPTS) * NUM_TOKENS / 2, "the test needs other prompts"


@pytest.mark.parametrize(
    ("family", "degrees", "shape"),
    [
        (LLAMA, TWO, {}),
        (LLAMA, Degrees(4), {}),  # two ranks write the same rows of a KV head
        (LLAMA, Degrees(3), NINE_HEADS),
        (LLAMA, TWO, NINE_HEADS),  # one KV head, and two
        (LLAMA, Degrees(1, 3), {}),
        ("gemma3", TWO, {}),
        ("gemma3", STAGES, {}),
        ("gpt-oss", TWO, {}),
    ],
)
@pytest.mark.parametrize("code", [*long("int8"), "fp8_e4m3"])
def test_ranks_draw_the_tokens_of_one_rank_over_coded_rows(
    opened: Callable[..., Checkpoint], family: str, degrees: Degrees, shape: dict[str, int], code: KvCode
) -> None:
    checkpoint = opened(family, **shape)
    assert_ranks_are_as_one(checkpoint.config, checkpoint.weights(), degrees, code)


@pytest.mark.long
@pytest.mark.parametrize("degrees", [TWO, STAGES], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_draw_the_tokens_of_one_rank_over_coded_rows_in_each_family(
    opened: Callable[..., Checkpoint], family: str, degrees: Degrees
) -> None:
    checkpoint = opened(family)
    tied = TIED_CODED if family in FLAT else TIED_ANYWHERE
    for code in CODES:
        assert_ranks_are_as_one(checkpoint.config, checkpoint.weights(), degrees, code, tied)


@pytest.mark.parametrize(("code", "degrees"), [*product(CODES, (TWO, Degrees(1, 3)))])
def test_decode_programs_of_ranks_attend_over_coded_rows(
    opened: Callable[..., Checkpoint], code: KvCode, degrees: Degrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, checkpoint = note_program_rows(monkeypatch), opened(LLAMA, intermediate_size=96)
    assert_ranks_are_as_one(checkpoint.config, in_form(checkpoint.weights(), "int8"), degrees, code)
    assert rows.count(len(PROMPTS)) > 4 * (degrees.num_ranks + 1)


@pytest.mark.parametrize(("code", "degrees"), [*product(CODES, (TWO, STAGES))])
def test_in_bfloat16_programs_over_coded_rows_compute_what_one_operation_after_the_other_does(
    opened: Callable[..., Checkpoint], code: KvCode, degrees: Degrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.model.ops_cpu._has_matrix_units", lambda: False)  # which oneDNN would multiply with
    if not has_bfloat16_products():
        pytest.skip("this processor has no products of bfloat16")
    rows, checkpoint = note_program_rows(monkeypatch), opened(LLAMA)

    def answers() -> list[list[int]]:
        with thread_ranks(degrees, checkpoint.config, checkpoint.weights(), torch.bfloat16, NUM_PAGES, code) as ranks:
            return greedy_texts(ranks, PROMPTS, NUM_TOKENS, CHUNK)

    found = answers()
    assert rows.count(len(PROMPTS)) > 4
    rows.clear()
    monkeypatch.setattr(runner_module, "is_compiled", lambda _: False)
    assert answers() == found
    assert not rows


@pytest.mark.parametrize(("code", "degrees"), [*product(CODES, (TWO, STAGES))])
def test_ranks_where_torch_attends_draw_the_tokens_of_one_rank_over_coded_rows(
    opened: Callable[..., Checkpoint], code: KvCode, degrees: Degrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "library", lambda: Missing(Reason.COMPILER, "none"))
    checkpoint = opened(LLAMA)
    assert_ranks_are_as_one(checkpoint.config, checkpoint.weights(), degrees, code)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("code", CODES)
def test_ranks_write_the_bytes_of_their_rows_and_those_of_one_rank_where_values_are_equal(
    opened: Callable[..., Checkpoint], code: KvCode, size: int
) -> None:
    # With one layer, no attention over rounded rows comes before the rows that are compared.
    checkpoint = opened(LLAMA, num_hidden_layers=1)
    given, asked = (checkpoint.config, checkpoint.weights(), torch.float32), PROMPTS[2]
    pages = [PageId(page) for page in range(-(-len(asked) // PAGE_SIZE))]

    def computed(runner: EngineRunner) -> torch.Tensor:
        for start in (0, 33):
            chunk = asked[start : 33 if start == 0 else len(asked)]
            runner.run(StepPlan((Chunk(chunk, start, pages, (spec(),) if start else ()),)))
        return runner.kv.flatten(1).view(torch.uint8).clone()

    def rows(chosen: KvCode | None) -> tuple[torch.Tensor, torch.Tensor]:
        with thread_ranks(Degrees(size), *given, len(pages), chosen) as ranks:
            of_ranks = computed(ranks)
        return of_ranks, computed(Runner(load_model(*given), len(pages), PAGE_SIZE, code=chosen))

    layouts = [describe_layout(checkpoint.config, "", PAGE_SIZE, dtype, "cpu") for dtype in ("float32", code)]
    conversion = conversion_between(*layouts)
    assert conversion is not None
    (plain, plain_of_one), (coded, coded_of_one) = rows(None), rows(code)
    assert torch.equal(conversion.of(plain), coded)
    row_bytes, width = conversion.source.row_bytes, conversion.target.row_bytes
    same = (plain.view(-1, row_bytes) == plain_of_one.view(-1, row_bytes)).all(1)
    assert same.float().mean() > 0.9
    assert torch.equal(coded.view(-1, width)[same], coded_of_one.view(-1, width)[same])
    assert len(coded.view(-1, width)[same].unique(dim=0)) > len(asked), "rows are not all alike"
