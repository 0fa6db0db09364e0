"""The sampling kernel, fed with requests' parameters, draws what the CPU's sampler draws."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from listed_answers import Listed
from long_cases import long
from torch import Tensor

from pdserve.engine.masks import token_masks
from pdserve.engine.sampler import Sampler
from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.step import SampleSpec
from pdserve.protocol.sampling import SamplingParams

VOCAB = 700
EOS = (3, 9)


def logits_of(num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)


def spec_of(index: int, params: SamplingParams, *, forbid_stops: bool = False) -> SampleSpec:
    rng = random.Random(index)
    prompt, output = (tuple(rng.randrange(VOCAB) for _ in range(count)) for count in (40, 25))
    return SampleSpec(params, 2**63 + index, 25, prompt, output, forbid_stops, (0, index))


def drawn_by_kernel(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    sampler = KernelSampler(EOS, VOCAB, 4, torch.device("cpu"))
    return sampler.sample(logits, specs).tolist()


def drawn_on_the_cpu(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    return [token.token_id for token in Sampler(EOS).sample(logits, specs)]


FILTERS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in product((0.0, 0.7, 1.5), (0, 1, 40), (1.0, 0.5), (0.0, 0.1))
]
CHANGES = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, logit_bias=((17, 100.0),)),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=0.8, logit_bias=((4, 5.0), (3, -2.0))),
]


@pytest.mark.parametrize("dtype", [*long(torch.float32), torch.bfloat16])
def test_mixed_filters_draw_the_cpu_samplers_tokens(dtype: torch.dtype) -> None:
    specs = [spec_of(index, params) for index, params in enumerate(FILTERS)]
    logits = logits_of(len(specs), dtype)
    assert drawn_by_kernel(logits, specs) == drawn_on_the_cpu(logits, specs)


def test_penalties_and_biases_beside_rows_without_draw_the_cpu_samplers_tokens() -> None:
    specs = [spec_of(index, params) for index, params in enumerate(CHANGES)]
    logits = logits_of(len(specs))
    tokens = drawn_by_kernel(logits, specs)
    assert tokens == drawn_on_the_cpu(logits, specs)
    assert tokens[3] == 17


def test_a_stop_is_drawn_only_once_it_may_be() -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=(20,), logit_bias=((9, 50.0), (20, 90.0), (33, 40.0)))
    specs = [spec_of(0, params), spec_of(0, params, forbid_stops=True)]
    logits = logits_of(1).expand(2, -1)
    assert drawn_by_kernel(logits, specs) == drawn_on_the_cpu(logits, specs) == [20, 33]


def test_allowed_and_forbidden_tokens_are_those_of_the_cpu_sampler() -> None:
    allowed = SamplingParams(temperature=2.0, top_p=0.9, allowed_token_ids=(5, 64, 699, 31))
    specs = [spec_of(row, SamplingParams(temperature=2.0)) for row in range(6)]
    specs += [spec_of(row, replace(allowed, bad_word_ids=((64,), (699,)))) for row in range(6)]
    specs += [
        spec_of(row, SamplingParams(temperature=0.0, allowed_token_ids=(9,)), forbid_stops=True) for row in range(2)
    ]
    specs += [spec_of(row, SamplingParams(temperature=0.0, bad_word_ids=((1,),))) for row in range(2)]
    logits = logits_of(len(specs))
    logits[-2:, 1] = 99.0
    drawn = drawn_by_kernel(logits, specs)
    assert drawn == drawn_on_the_cpu(logits, specs)
    assert {*drawn[6:12]} <= {5, 31}
    assert drawn[12:14] == [9, 9]  # nothing else is left
    assert 1 not in drawn[14:]


@pytest.mark.parametrize("eos", [VOCAB, VOCAB + 17, 10 * VOCAB])
def test_an_end_past_the_vocabulary_forbids_nothing_in_other_rows(eos: int) -> None:
    specs = [spec_of(row, SamplingParams(temperature=0.0), forbid_stops=True) for row in range(3)]
    logits = torch.zeros(3, VOCAB)
    logits[:, eos % VOCAB] = 5.0
    sampler = KernelSampler((eos,), VOCAB, 4, torch.device("cpu"))
    drawn_on_the_cpu = [token.token_id for token in Sampler((eos,)).sample(logits, specs)]
    assert sampler.sample(logits, specs).tolist() == drawn_on_the_cpu == [eos % VOCAB] * 3


@pytest.mark.parametrize("temperature", [9e-6, 1e-38, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_temperature_too_low_to_divide_by_takes_the_likeliest(temperature: float, filters: dict[str, float]) -> None:
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    specs = [spec_of(row, params) for row in range(8)]
    logits = logits_of(len(specs)) * 10
    assert drawn_by_kernel(logits, specs) == drawn_on_the_cpu(logits, specs) == logits.argmax(-1).tolist()


def test_rows_with_a_grammar_draw_the_cpu_samplers_tokens() -> None:
    matcher = Listed({(token,) for token in range(2, VOCAB, 37)}, VOCAB)
    with_grammar = [
        replace(spec_of(index, params), matcher=matcher, output_ids=(), index=0) for index, params in enumerate(FILTERS)
    ]
    specs = [each for pair in zip(with_grammar, map(spec_of, range(90, 200), CHANGES), strict=False) for each in pair]
    specs.append(spec_of(7, SamplingParams(allowed_token_ids=(5, 6))))
    logits, masks = logits_of(len(specs)), token_masks(specs, VOCAB, EOS)
    sampler = KernelSampler(EOS, VOCAB, 4, torch.device("cpu"))
    drawn = sampler.sample(logits, specs, masks).tolist()
    assert drawn == [token.token_id for token in Sampler(EOS).sample(logits, specs, masks)]
    assert all(token % 37 == 2 for token in drawn[:-1:2])
