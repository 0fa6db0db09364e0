"""A runner writes only the pages its plan names, and what it draws does not depend on who else is in the step."""

import random

import pytest
import torch
from greedy_runs import greedy_texts, spec
from long_cases import long
from small_models import small_config, small_model

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import ChosenQuantization
from pdserve.engine.runner import Runner, is_compiled
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.model.family import Model
from pdserve.protocol.sampling import SamplingParams

VOCAB = 300
PAGE_SIZE = 8
CONFIG = small_config(VOCAB)
PROMPT = [random.Random(2).randrange(VOCAB) for _ in range(20)]
PAGES = tuple(PageId(page) for page in (4, 1, 7))


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(CONFIG)


@pytest.fixture
def runner(model: Model) -> Runner:
    return Runner(model, 60, PAGE_SIZE)


def prompt_chunk(*samples: SampleSpec) -> Chunk:
    return Chunk(PROMPT, 0, PAGES, samples)


def test_a_page_is_one_contiguous_run(runner: Runner) -> None:
    assert runner.kv.shape == (60, 2, 2, 2, PAGE_SIZE, 32)
    assert runner.kv.is_contiguous()
    assert not runner.kv.any()


def test_only_the_slots_of_the_chunk_are_written(runner: Runner) -> None:
    runner.kv.fill_(9.0)
    runner.run(StepPlan((Chunk(PROMPT[:10], 3, PAGES, ()),)))
    untouched = torch.ones(60, PAGE_SIZE, dtype=torch.bool)
    for position in range(3, 13):
        untouched[PAGES[position // PAGE_SIZE], position % PAGE_SIZE] = False
    by_slot = runner.kv.permute(0, 4, 1, 2, 3, 5)
    assert (by_slot[untouched] == 9.0).all()
    assert not (by_slot[~untouched] == 9.0).flatten(1).all(-1).any()


def test_results_stand_in_the_order_of_the_plan(runner: Runner) -> None:
    one = (spec(),)
    longer, shorter = Chunk(PROMPT, 0, PAGES, one * 2), Chunk([5], 0, (PageId(9),), one)
    silent = Chunk(PROMPT[:5], 0, (PageId(11),), ())
    alone = [runner.run(StepPlan((chunk,))).tokens[0] for chunk in (longer, silent, shorter)]
    assert list(runner.run(StepPlan((longer, silent, shorter))).tokens) == alone
    assert [len(tokens) for tokens in alone] == [2, 0, 1]
    assert alone[0][0] == alone[0][1] != alone[2][0]


def test_a_copied_page_serves_like_the_original(runner: Runner) -> None:
    runner.run(StepPlan((prompt_chunk(),)))
    copy = PageId(30)
    original = Chunk([8], 20, PAGES, (spec(),))
    expected = runner.run(StepPlan((original,))).tokens
    runner.kv[30].fill_(1.0)
    copied = Chunk([8], 20, (PAGES[0], PAGES[1], copy), (spec(),))
    assert runner.run(StepPlan((copied,), copies=((PAGES[2], copy),))).tokens == expected
    assert torch.equal(runner.kv[30], runner.kv[7])


def test_a_plan_of_copies_alone_copies(runner: Runner) -> None:
    runner.kv[3].fill_(3.0)
    assert runner.run(StepPlan((), copies=((PageId(3), PageId(4)), (PageId(4), PageId(5))))).tokens == ()
    assert (runner.kv[4] == 3.0).all()
    assert not runner.kv[5].any()  # all pages are read before any is written


@pytest.mark.parametrize("copies", [((PageId(0), PageId(60)),), ((PageId(-1), PageId(0)),)])
def test_copies_outside_the_pool_are_our_own_fault(runner: Runner, copies: tuple[tuple[PageId, PageId], ...]) -> None:
    with pytest.raises(InvariantError):
        runner.run(StepPlan((), copies=copies))


def test_stale_slots_of_a_page_are_never_seen(runner: Runner) -> None:
    clean = greedy_texts(runner, [PROMPT, PROMPT[:9]], 12)
    runner.kv.fill_(50.0)
    assert greedy_texts(runner, [PROMPT, PROMPT[:9]], 12) == clean


def test_company_does_not_change_a_seeded_draw(runner: Runner) -> None:
    rng = random.Random(4)
    params = SamplingParams(temperature=1.3, top_p=0.9)
    lengths = (1, 5, 20, 40, 41)
    chunks = []
    for index, length in enumerate(lengths):
        pages = tuple(PageId(6 * index + i) for i in range(-(-length // PAGE_SIZE)))
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        chunks.append(Chunk(tokens, 0, pages, (spec((), params, seed=index),)))
    together = runner.run(StepPlan(tuple(chunks))).tokens
    assert together == tuple(runner.run(StepPlan((chunk,))).tokens[0] for chunk in chunks)


def test_eos_comes_from_the_caller_where_given(model: Model) -> None:
    everything_but_7 = tuple(token for token in range(VOCAB) if token != 7)
    for eos, expected in (((), PROMPT), (everything_but_7, [7])):
        runner = Runner(model, 10, PAGE_SIZE, eos)
        held_back = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), forbid_stops=True, sequence=(0, 0))
        (((token,),),) = runner.run(StepPlan((prompt_chunk(held_back),))).tokens
        assert (token.token_id == 7) == (expected == [7])


def test_in_bfloat16_the_same_chunking_gives_the_same_text() -> None:
    model = small_model(CONFIG, torch.bfloat16)
    texts = [greedy_texts(Runner(model, 60, PAGE_SIZE), [PROMPT], 32, chunk_tokens=8) for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_decode_step_is_one_program_with_the_bits_of_its_operations(
    monkeypatch: pytest.MonkeyPatch, quantization: ChosenQuantization
) -> None:
    model = small_model(CONFIG, torch.bfloat16, quantization)
    if not is_compiled(model):
        pytest.skip("this processor has no products of bfloat16")
    asked = SamplingParams(temperature=0.0, logprobs=5)
    steps = []
    for count in (1, 3, 20, 2):  # programs have room for 1, 4, 32 and again 32 rows
        chunks = (
            Chunk([7 + k], k, tuple(PageId(4 * k + i) for i in range(3)), (spec((), asked),)) for k in range(count)
        )
        steps.append(StepPlan(tuple(chunks)))
    runner = Runner(model, 100, PAGE_SIZE)
    together = [runner.run(step).tokens for step in steps]
    monkeypatch.setattr("pdserve.engine.runner.is_compiled", lambda _: False)
    one_by_one = Runner(model, 100, PAGE_SIZE)
    assert together == [one_by_one.run(step).tokens for step in steps]
    assert torch.equal(runner.kv, one_by_one.kv)


def forced_logprob(model: Model) -> float:
    """Return the log probability of a token after the prompt."""
    asked = spec((), SamplingParams(temperature=0.0, logprobs=0))
    bias = SamplingParams(temperature=0.0, logprobs=0, logit_bias=((42, 100.0),))
    result = Runner(model, 10, PAGE_SIZE).run(StepPlan((prompt_chunk(asked, spec((), bias)),)))
    (_, (forced,)) = result.tokens[0]
    assert forced.token_id == 42
    assert forced.logprobs is not None
    return forced.logprobs.chosen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_stay_close_to_float32(model: Model, dtype: torch.dtype) -> None:
    assert forced_logprob(small_model(CONFIG, dtype)) == pytest.approx(forced_logprob(model), abs=0.3)


@pytest.mark.parametrize("page_size", [1, *long(4, 16), 64])
@pytest.mark.parametrize("chunk_tokens", [7, 64])
def test_neither_page_size_nor_chunking_changes_the_text(model: Model, page_size: int, chunk_tokens: int) -> None:
    prompts = [PROMPT, PROMPT[:1], PROMPT * 3]
    expected = greedy_texts(Runner(model, 60, PAGE_SIZE), prompts, 16)
    assert greedy_texts(Runner(model, 200, page_size), prompts, 16, chunk_tokens) == expected


def forget_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("model.loading", "engine.runner", "engine.sampler"):
        monkeypatch.setattr(f"pdserve.{user}.library", lambda: Missing(Reason.COMPILER, "for this test"))


def test_without_compiled_kernels_the_text_is_the_same(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, PROMPT[:9]]
    expected = greedy_texts(runner, prompts, 12)
    forget_library(monkeypatch)
    assert greedy_texts(Runner(small_model(CONFIG), 60, PAGE_SIZE), prompts, 12) == expected


def test_without_compiled_kernels_quantized_weights_stay_close(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = forced_logprob(small_model(CONFIG, torch.float32, "int8"))
    forget_library(monkeypatch)
    assert forced_logprob(small_model(CONFIG, torch.float32, "int8")) == pytest.approx(compiled, abs=0.1)
