"""With K and V in a byte a value, an engine answers as a plain model does whose rows of K and V are rounded one by one.

The plain model sees all tokens at once and has no pages. It rounds by code of its own.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import reference_kernels as reference
import torch
from greedy_runs import greedy_texts, spec
from loaded_models import loaded_model
from long_cases import long
from model_zoo import prompt, write_model
from scheduled import Scheduled, sequence_of
from small_models import small_config, small_model
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.engine import runner as runner_module
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.engine.verification import verifying
from pdserve.executor.failing import Isolating
from pdserve.executor.layouts import describe_layout
from pdserve.kernels.cpu.attention import QkNorm
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.model.family import Model
from pdserve.model.rope import rotate_
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams

VOCAB, END, NUM_TOKENS = 90, 5, 24
CODES: tuple[KvCode, ...] = ("int8", "fp8_e4m3")
SIZES = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1])
PROMPTS = [[(7 * i + 3 * length) % VOCAB for i in range(length)] for length in (5, 16, 33, 70)]


def rounded(row: np.ndarray, code: KvCode) -> np.ndarray:
    """Return what is left of a row: multiples of its scale, or of e4m3's values."""
    scale = np.abs(row).max() / np.float32(127 if code == "int8" else 448)
    if code == "int8":
        return np.rint(row / scale) * scale
    nearest = np.abs(np.abs(row / scale)[:, None] - SIZES).argmin(1)
    return np.copysign(SIZES[nearest], row) * scale


class Plain:
    """The attention of one sequence over all of its tokens."""

    def __init__(self, model: Model, code: KvCode) -> None:
        self._model, self._code = model, code

    def run(self, layer: int, qkv: Tensor, qk_norm: QkNorm | None, sinks: Tensor | None = None) -> Tensor:
        config = self._model.config
        heads = qkv[:, : config.num_heads + config.num_kv_heads]
        if qk_norm is not None and not qk_norm.after_rope:
            weights = [qk_norm.q] * config.num_heads + [qk_norm.k] * config.num_kv_heads
            heads = reference.rms_norm(heads, torch.stack(weights), qk_norm.eps)
        heads = heads.clone()
        rotate_(heads, self._model.ropes[layer].angles(torch.arange(len(qkv)), qkv.dtype))
        rows = torch.cat((heads[:, config.num_heads :], qkv[:, len(heads[0]) :]), 1)
        kept = np.apply_along_axis(partial(rounded, code=self._code), -1, rows.numpy())
        k, v = torch.from_numpy(kept).double().transpose(0, 1).chunk(2)
        scores = config.design.attentions[layer].scores
        scoring = reference.Scoring(config.scale(scores), scores.window, scores.soft_cap, sinks)
        return reference.attention(heads[:, : config.num_heads].double(), k, v, scoring).flatten(1).to(qkv.dtype)


@torch.inference_mode()
def plain_answer(model: Model, code: KvCode, asked: Seq[int], num_tokens: int) -> list[int]:
    tokens = list(asked)
    for _ in range(num_tokens):
        logits = model.forward(torch.tensor(tokens), Plain(model, code), torch.tensor([len(tokens) - 1]))
        tokens.append(int(logits.argmax()))
    return tokens[len(asked) :]


@cache
def of_small_model() -> Model:
    return small_model(small_config(VOCAB, eos_token_id=END))


@cache
def expected(code: KvCode) -> list[list[int]]:
    return [plain_answer(of_small_model(), code, asked, NUM_TOKENS) for asked in PROMPTS]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("chunk_tokens", [13, 100])
def test_log_probabilities_are_those_of_rounded_rows(code: KvCode, chunk_tokens: int) -> None:
    model, asked, pages = of_small_model(), PROMPTS[3], list(map(PageId, range(5)))
    with torch.inference_mode():
        logits = model.forward(torch.tensor(asked), Plain(model, code), torch.tensor([len(asked) - 1]))
    wanted = logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    distances = []
    for chosen in (code, None):
        runner = Runner(model, 20, 16, code=chosen)
        for start in range(0, len(asked), chunk_tokens):
            samples = (spec((), params),) if start + chunk_tokens >= len(asked) else ()
            result = runner.run(StepPlan((Chunk(asked[start : start + chunk_tokens], start, pages, samples),)))
        found = result.tokens[0][0][0].logprobs
        distances.append(max(abs(logprob - float(wanted[token])) for token, logprob in found.top))
    assert distances[0] < 1e-4 < distances[1] / 5


@pytest.mark.parametrize(("code", "page_size", "chunk_tokens"), [*product(CODES, [16, 32], [7, 1000])])
def test_a_runner_answers_as_the_plain_model(code: KvCode, page_size: int, chunk_tokens: int) -> None:
    runner = Runner(of_small_model(), 60, page_size, code=code)
    assert greedy_texts(runner, PROMPTS, NUM_TOKENS, chunk_tokens) == expected(code)


@pytest.mark.parametrize(("code", "chunk_tokens"), [*product(CODES, [7, 1000])])
def test_so_does_plain_torch(monkeypatch: pytest.MonkeyPatch, code: KvCode, chunk_tokens: int) -> None:
    monkeypatch.setattr(runner_module, "library", lambda: Missing(Reason.COMPILER, "none"))
    runner = Runner(of_small_model(), 60, 16, code=code)
    assert greedy_texts(runner, PROMPTS, NUM_TOKENS, chunk_tokens) == expected(code)


class Bench(Scheduled):
    """A scheduler and a runner that plans a step while one is computed."""

    def __init__(self, code: KvCode, num_pages: int, page_size: int = 16, known: Seq[Seq[int]] = ()) -> None:
        """known: answers of which tokens are guessed, each fourth one wrong."""
        runner = Runner(of_small_model(), num_pages, page_size, (END,), code=code)
        cache_ = KvCache(num_pages, paging_of(runner.groups), PrefixHasher(b"secret", "model"))
        limits = Limits(8, 40, 400, frozenset({END}), 6 if known else 0)
        super().__init__(cache_, limits, Isolating(verifying(runner.run)).run, depth=2)
        self.known, self.num_guesses = known, 0

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        result, drafts = self.compute(plan), {}
        self.num_guesses += sum(chunk.num_drafts for chunk in plan.chunks)
        for place, (chunk, tokens) in enumerate(zip(plan.chunks, result.tokens, strict=True)):
            if self.known and tokens:
                answer, first = self.known[chunk.samples[0].sequence[0]], chunk.samples[0].index + len(tokens[0])
                drafts[place] = tuple(
                    [(token + (at % 4 == 3)) % VOCAB for at, token in enumerate(answer[first : first + 6], first)]
                )
        brought = replace(result, drafts=drafts, elapsed_s=0.01 + 0.0001 * plan.num_tokens)  # rows cost little
        return lambda: brought

    def answer(self, prompts: Mapping[int, Seq[int]]) -> dict[int, list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for number, asked in prompts.items():
            self.scheduler.add(sequence_of(number, asked, params))
        self.run()
        return {number: tokens for (number, _), tokens in sorted(self.answers.items())}


@pytest.mark.parametrize(("code", "shape"), [*product(CODES, [(16, 100), (32, 50), (16, 7), (32, 4)])])
def test_a_scheduler_answers_as_the_plain_model(code: KvCode, shape: tuple[int, int]) -> None:
    page_size, num_pages = shape
    bench = Bench(code, num_pages, page_size)
    assert list(bench.answer(dict(enumerate(PROMPTS))).values()) == expected(code)
    assert bench.num_ahead > 0
    assert bool(bench.scheduler.num_preemptions) == (num_pages < 10)


@pytest.mark.parametrize("code", CODES)
def test_a_cached_prefix_is_as_one_that_was_computed(code: KvCode) -> None:
    bench = Bench(code, 100)
    bench.answer({9: PROMPTS[3]})
    before = len(bench.scheduler.cache.spans)
    answers = bench.answer(dict(enumerate(PROMPTS)))
    assert before > 0
    assert [answers[number] for number in range(len(PROMPTS))] == expected(code)
    assert answers[9] == expected(code)[3]


@pytest.mark.parametrize(("code", "num_pages"), [*product(CODES, [100, 7])])
def test_guesses_are_verified_over_the_same_rows(code: KvCode, num_pages: int) -> None:
    bench = Bench(code, num_pages, known=expected(code))
    assert list(bench.answer(dict(enumerate(PROMPTS))).values()) == expected(code)
    assert bench.num_guesses > 20


@pytest.mark.parametrize("code", CODES)
def test_pages_that_another_runner_wrote_go_on_as_own_ones(code: KvCode) -> None:
    writer, reader = (Runner(of_small_model(), 20, 16, code=code) for _ in range(2))
    asked, theirs, ours = PROMPTS[3], list(map(PageId, (3, 9, 1, 4, 12, 0))), list(map(PageId, (8, 2, 15, 6, 7, 1)))
    for start in range(0, len(asked), 9):
        samples = (spec(),) if start + 9 >= len(asked) else ()
        drawn = writer.run(StepPlan((Chunk(asked[start : start + 9], start, theirs, samples),)))
        reader.run(StepPlan((Chunk(asked[start : start + 9], start, ours, ()),)))
    assert torch.equal(reader.kv[ours[:5]], writer.kv[theirs[:5]]), "pages that arrive are those written here"
    reader.kv.fill_(255)
    reader.kv[ours[:5]] = writer.kv[theirs[:5]]
    answer = [drawn.tokens[0][0][0].token_id]
    while len(answer) < NUM_TOKENS:
        chunk = Chunk(answer[-1:], len(asked) + len(answer) - 1, ours, (spec(tuple(answer)),))
        answer.append(reader.run(StepPlan((chunk,))).tokens[0][0][0].token_id)
    assert answer == expected(code)[3]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", *long("llama3", "cohere2", "mixtral", "olmo3")])
def test_windows_soft_caps_and_sinks_are_served_so(tmp_path: Path, family: str, code: KvCode) -> None:
    model = loaded_model(write_model(family, tmp_path))
    asked = [prompt(length) for length in (9, 130)]
    wanted = [plain_answer(model, code, each, 6) for each in asked]
    assert greedy_texts(Runner(model, 40, 16, code=code), asked, 6, 25) == wanted


@pytest.mark.parametrize("code", CODES)
def test_a_page_has_the_bytes_that_its_layout_says(code: KvCode) -> None:
    model = of_small_model()
    plain, coded = (describe_layout(model.config, "", 16, dtype, "cpu") for dtype in ("bfloat16", code))
    runner = Runner(model, 3, 16, code=code)
    assert runner.kv[0].nbytes == coded.page_bytes == 2 * 2 * 2 * 16 * (32 + 4)
    assert coded.page_bytes < 0.6 * plain.page_bytes
