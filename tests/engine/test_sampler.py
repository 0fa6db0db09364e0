"""Every draw against a plain-Python reading of the same rules, one row at a time."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import reference_kernels as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_kernels import RowParams
from torch import Tensor

from pdserve.engine.sampler import Sampler, adjust
from pdserve.engine.step import SampleSpec
from pdserve.kernels import rng
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.protocol.sampling import SampledToken, SamplingParams

VOCAB = 400
EOS = (3, 9)
SAMPLER = Sampler(EOS)


def spec_of(
    params: SamplingParams,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    seed: int = 0,
    index: int = 0,
    forbid_stops: bool = False,
) -> SampleSpec:
    return SampleSpec(params, seed, index, prompt, output, forbid_stops, (0, index))


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    return [token.token_id for token in SAMPLER.sample(logits, specs)]


def adjusted_by_hand(logits: list[float], spec: SampleSpec) -> list[float]:
    """Return the logits after penalties, bias and forbidden stops."""
    params, out = spec.params, list(logits)
    for token in {*spec.prompt_ids, *spec.output_ids}:
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in Counter(spec.output_ids).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        out[token] += bias
    if spec.forbid_stops:
        for token in {*EOS, *params.stop_token_ids}:
            out[token] = -math.inf
    for token in spec.forbidden:
        out[token] = -math.inf
    if params.allowed_token_ids:
        out = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(out)]
    return out


def kept_by_hand(logits: list[float], params: SamplingParams) -> set[int]:
    """Return the tokens that temperature, top-k, top-p and min-p leave."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    total, before, kept = sum(weights), 0.0, set()
    for token, weight in zip(order, weights, strict=True):
        if before / total < params.top_p and weight >= params.min_p:
            kept.add(token)
        before += weight
    return kept


def drawn_by_hand(logits: list[float], spec: SampleSpec) -> int:
    """Return the kept token whose scaled logit plus noise is largest."""
    scaled = torch.tensor(logits) / spec.params.temperature
    (key,), ids = rng.keys([spec.seed], [spec.index]), np.arange(len(logits), dtype=np.uint32)
    noisy = scaled + torch.from_numpy(rng.gumbel(key, ids))
    return max(kept_by_hand(logits, spec.params), key=lambda token: float(noisy[token]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_largest_logit(dtype: torch.dtype) -> None:
    logits = random_logits(5).to(dtype)
    greedy = SamplingParams(temperature=0.0)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert draw(logits, [spec_of(greedy)] * 5) == expected


def test_nothing_to_draw_draws_nothing() -> None:
    assert SAMPLER.sample(torch.empty(0, VOCAB), []) == []


FILTERS = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.4),
    "top-k 1": SamplingParams(top_k=1),
    "top-k": SamplingParams(top_k=5),
    "top-k over the candidates": SamplingParams(top_k=300),
    "top-k of the vocabulary": SamplingParams(top_k=VOCAB),
    "top-p": SamplingParams(top_p=0.6),
    "top-p tiny": SamplingParams(top_p=1e-6),
    "top-p wide": SamplingParams(temperature=8.0, top_p=0.95),
    "min-p": SamplingParams(min_p=0.05),
    "min-p wide": SamplingParams(temperature=20.0, min_p=0.2),
    "min-p 1": SamplingParams(min_p=1.0),
    "top-k then top-p": SamplingParams(temperature=2.0, top_k=20, top_p=0.5),
    "all": SamplingParams(temperature=1.5, top_k=30, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_draws_what_the_plain_rules_draw(name: str) -> None:
    logits = random_logits(40)
    specs = [spec_of(FILTERS[name], seed=row, index=row) for row in range(40)]
    assert draw(logits, specs) == [drawn_by_hand(row, spec) for row, spec in zip(logits.tolist(), specs, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (7, 3.0), (400, 30.0), (4099, 0.1), (4112, 6.0)])
def test_compiled_and_numpy_draw_the_same(
    monkeypatch: pytest.MonkeyPatch, vocab: int, spread: float, dtype: torch.dtype
) -> None:
    params = [replace(each, top_k=min(each.top_k, vocab)) for each in FILTERS.values()] * 2
    logits = random_logits(len(params), vocab, spread=spread).to(dtype)
    logits[1::5] = logits[1::5].round()  # equal ones
    logits[0, 0], logits[-1, vocab // 2] = math.inf, math.nan
    specs = [spec_of(each, seed=row, index=row) for row, each in enumerate(params)]
    monkeypatch.setattr("pdserve.engine.sampler.library", lambda: Missing(Reason.COMPILER, "for this test"))
    in_numpy = [token.token_id for token in Sampler(EOS).sample(logits, specs)]
    assert draw(logits, specs) == in_numpy


@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all"])
def test_only_kept_tokens_are_ever_drawn_and_each_of_them_is(name: str) -> None:
    logits = random_logits(1, vocab=60, spread=1.0)
    params = FILTERS[name]
    drawn = set(draw(logits.expand(4000, -1), [spec_of(params, seed=seed) for seed in range(4000)]))
    assert drawn == kept_by_hand(logits[0].tolist(), params)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=VOCAB), SamplingParams(top_p=0.9999999)])
def test_unlikely_tokens_that_are_many_are_drawn_as_often_as_they_weigh(params: SamplingParams) -> None:
    logits = torch.full((1, VOCAB), -10.5)
    logits[0, 6] = 0.0  # the others weigh 1.1 % of it together
    drawn = Counter(draw(logits.expand(4000, -1), [spec_of(params, seed=seed) for seed in range(4000)]))
    assert 20 < 4000 - drawn[6] < 80


def test_equal_logits_at_the_edge_of_top_k_stand_together() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 2.0
    params = SamplingParams(top_k=2)
    drawn = draw(logits.expand(2000, -1), [spec_of(params, seed=seed) for seed in range(2000)])
    assert len(set(drawn)) > VOCAB // 2


PENALTIES = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "repetition below one": SamplingParams(temperature=0.0, repetition_penalty=0.5),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=-0.7),
    "bias": SamplingParams(temperature=0.0, logit_bias=((7, 4.5), (8, -100.0))),
    "stops": SamplingParams(temperature=0.0, stop_token_ids=(11, 3)),
    "allowed": SamplingParams(temperature=0.0, allowed_token_ids=(2, 9, 17, 33)),
    "all": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((7, 2.0),), stop_token_ids=(1,)
    ),
}


@st.composite
def penalized(draw: st.DrawFn) -> SampleSpec:
    texts = st.lists(st.integers(0, 30), max_size=12).map(tuple)
    params = PENALTIES[draw(st.sampled_from(sorted(PENALTIES)))]
    forbidden = draw(st.lists(st.integers(0, 39), max_size=3).map(tuple))
    forbid_stops = draw(st.booleans()) and not {2, 17, 33}.issubset(forbidden)
    params = replace(params, bad_word_ids=tuple((token,) for token in forbidden))
    return spec_of(params, draw(texts), draw(texts), forbid_stops=forbid_stops)


@settings(deadline=None)
@given(st.lists(penalized(), min_size=1, max_size=5))
def test_logits_are_adjusted_row_by_row_as_by_hand(specs: list[SampleSpec]) -> None:
    logits = random_logits(len(specs), vocab=40)
    expected = [adjusted_by_hand(row, spec) for row, spec in zip(logits.tolist(), specs, strict=True)]
    for row, spec in zip(logits, specs, strict=True):
        adjust(row.numpy(), spec, EOS)
    torch.testing.assert_close(logits, torch.tensor(expected))


def row_params(spec: SampleSpec) -> RowParams:
    params, bias = spec.params, dict(spec.params.logit_bias)
    if spec.forbid_stops:
        bias |= dict.fromkeys((*EOS, *params.stop_token_ids), -math.inf)
    filters = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    penalties = {"frequency": params.frequency_penalty, "presence": params.presence_penalty}
    texts = {"prompt_ids": tuple(spec.prompt_ids), "output_ids": tuple(spec.output_ids)}
    return RowParams(
        params.temperature,
        **filters,
        **penalties,
        **texts,
        repetition=params.repetition_penalty,
        bias=bias,
        allowed=params.allowed_token_ids or None,
    )


def test_every_row_gets_the_token_of_the_kernels_reference() -> None:
    mixed = [*FILTERS.values(), *PENALTIES.values(), SamplingParams(temperature=0.0)] * 3
    specs = [
        spec_of(params, (1, 2, 3), (4, 4, row % 9), seed=2**63 + row, index=row, forbid_stops=row % 4 == 0)
        for row, params in enumerate(mixed)
    ]
    logits = random_logits(len(specs))
    keys = rng.keys([spec.seed for spec in specs], [spec.index for spec in specs])
    rows = zip(logits.double(), map(row_params, specs), keys, strict=True)
    assert draw(logits, specs) == [reference.sample(*row) for row in rows]


def test_penalties_and_forbidden_stops_reach_greedy_rows() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 3], logits[:, 20], logits[:, 21] = 5.0, 4.0, 3.0
    greedy = SamplingParams(temperature=0.0)
    shy = SamplingParams(temperature=0.0, presence_penalty=2.0)
    specs = [spec_of(greedy), spec_of(greedy, forbid_stops=True), spec_of(shy, output=(20,), forbid_stops=True)]
    assert draw(logits, specs) == [3, 20, 21]


def test_what_would_leave_no_allowed_token_forbids_nothing() -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=(EOS[0], 40), stop_token_ids=(40,))
    logits = torch.zeros(3, VOCAB)
    logits[:, 40] = 1.0
    specs = [
        spec_of(params, forbid_stops=True),
        spec_of(replace(params, bad_word_ids=((40,), (EOS[0],)))),
        spec_of(replace(params, bad_word_ids=((40,),))),
    ]
    assert draw(logits, specs) == [40, 40, EOS[0]]


@pytest.mark.parametrize("eos", [VOCAB, VOCAB + 17, 10 * VOCAB])
def test_an_end_past_the_vocabulary_forbids_nothing_in_other_rows(eos: int) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, eos % VOCAB] = 5.0
    specs = [spec_of(SamplingParams(temperature=0.0), forbid_stops=True)] * 3
    assert [token.token_id for token in Sampler((eos,)).sample(logits, specs)] == [eos % VOCAB] * 3


@pytest.mark.parametrize("temperature", [9e-6, 1e-38, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_temperature_too_low_to_divide_by_takes_the_likeliest(temperature: float, filters: dict[str, float]) -> None:
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    logits = random_logits(8, spread=30.0)
    specs = [spec_of(params, seed=row) for row in range(8)]
    assert draw(logits, specs) == logits.argmax(-1).tolist()


def test_the_models_logits_are_left_as_they_are() -> None:
    logits = random_logits(len(PENALTIES))
    before = logits.clone()
    draw(logits, [spec_of(params, (1, 2), (3,), forbid_stops=True) for params in PENALTIES.values()])
    assert torch.equal(logits, before)


def test_a_draw_depends_on_its_own_row_and_on_nothing_else_in_the_batch() -> None:
    mixed = [*FILTERS.values(), *PENALTIES.values(), SamplingParams(temperature=0.0), SamplingParams(logprobs=3)] * 2
    random.Random(0).shuffle(mixed)
    specs = [spec_of(params, (1, 2, 3), (4, 4), seed=2**63 + i, index=i) for i, params in enumerate(mixed)]
    logits = random_logits(len(specs))
    together = SAMPLER.sample(logits, specs)
    alone = [SAMPLER.sample(logits[i : i + 1], [spec])[0] for i, spec in enumerate(specs)]
    backwards = SAMPLER.sample(logits.flip(0), specs[::-1])[::-1]
    assert [t.token_id for t in together] == [t.token_id for t in alone] == [t.token_id for t in backwards]


def test_seed_and_index_each_change_the_draw() -> None:
    logits = torch.zeros(1, VOCAB).expand(50, -1)
    by_seed = draw(logits, [spec_of(SamplingParams(), seed=i) for i in range(50)])
    by_index = draw(logits, [spec_of(SamplingParams(), index=i) for i in range(50)])
    same = draw(logits, [spec_of(SamplingParams())] * 50)
    assert len(set(by_seed)) > 30
    assert len(set(by_index)) > 30
    assert len(set(same)) == 1


@pytest.mark.parametrize(("is_compiled", "draws"), [(True, 8000), (False, 3000)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=1.3, top_k=6),
        SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02),
        SamplingParams(frequency_penalty=0.4, repetition_penalty=1.2, logit_bias=((3, 0.7),)),
    ],
)
def test_frequencies_fit_the_distribution(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, is_compiled: bool, draws: int
) -> None:
    if not is_compiled:
        monkeypatch.setattr("pdserve.engine.sampler.library", lambda: Missing(Reason.COMPILER, "for this test"))
    logits = random_logits(1, vocab=12, spread=1.0)
    specs = [spec_of(params, (1,), (2, 2, 5), seed=77, index=index) for index in range(draws)]
    counts = Counter(token.token_id for token in Sampler(EOS).sample(logits.expand(draws, -1), specs))
    adjusted = adjusted_by_hand(logits[0].tolist(), specs[0])
    kept = sorted(kept_by_hand(adjusted, params))
    shares = (torch.tensor(adjusted)[kept].double() / params.temperature).softmax(-1).tolist()
    chi_square = sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in zip(kept, shares, strict=True))
    assert set(counts) <= set(kept)
    assert chi_square < 35.0  # 11 degrees of freedom exceed this once in 4,000 seeds


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3)
    params = SamplingParams(temperature=0.0, logit_bias=((17, 100.0),), logprobs=4)
    tokens = SAMPLER.sample(logits, [spec_of(SamplingParams()), spec_of(params), spec_of(SamplingParams(logprobs=0))])
    assert tokens[0].logprobs is None
    expected = logits[1].double().log_softmax(-1)
    best = expected.topk(4)
    assert tokens[1].token_id == 17
    assert tokens[1].logprobs is not None
    assert tokens[1].logprobs.chosen == pytest.approx(float(expected[17]), abs=1e-5)
    assert [token for token, _ in tokens[1].logprobs.top] == best.indices.tolist()
    assert [value for _, value in tokens[1].logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert tokens[2].logprobs is not None
    assert tokens[2].logprobs.top == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FILTERS)
def test_broken_logits_still_give_a_token_of_the_vocabulary(name: str, value: float) -> None:
    logits = torch.full((1, VOCAB), value)
    (token,) = SAMPLER.sample(logits, [spec_of(FILTERS[name])])
    assert isinstance(token, SampledToken)
    assert 0 <= token.token_id < VOCAB
