"""Only tokens of its grammar's mask are sampled for a sequence, of which nobody else in the step sees anything."""

import os
import random
import threading
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from greedy_runs import spec
from hypothesis import given
from hypothesis import strategies as st
from listed_answers import Listed
from scheduled import Scheduled, sequence_of

from pdserve.engine.kvcache import KvCache
from pdserve.engine.masks import NO_MASKS, allowed, packed, token_masks
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.scheduler import Limits
from pdserve.engine.sequence import Finish, Sequence
from pdserve.engine.step import Bits, SampleSpec
from pdserve.executor.failing import Isolating
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SamplingParams

VOCAB, END = 70, 5
ANSWERS = {(1, 2, 3, END), (1, 2, 60, 61, 62, END), (1, 63, 64, 65, 66, END), (41, 42, 43, 44, 45, 46, END)}
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": END,
    }
)
TOKENS = st.frozensets(st.integers(0, VOCAB - 1), max_size=6)


def spec_of(params: SamplingParams, matcher: Listed, output: tuple[int, ...] = (), **limits: object) -> SampleSpec:
    return SampleSpec(params, 1, len(output), (), output, bool(limits.get("early")), (0, 0), matcher)


@given(st.frozensets(st.integers(0, VOCAB - 1), min_size=1, max_size=9), TOKENS, TOKENS, st.booleans())
def test_a_mask_is_what_grammar_and_request_allow_but_for_what_is_unwanted_where_more_is_left(
    following: frozenset[int], named: frozenset[int], bad: frozenset[int], early: bool
) -> None:
    bad_words = tuple((token,) for token in bad)
    params = SamplingParams(allowed_token_ids=tuple(named), stop_token_ids=(7,), bad_word_ids=bad_words)
    matcher = Listed({(token,) for token in following}, VOCAB)
    masks = token_masks([spec_of(params, matcher, early=early)], VOCAB, (END, 5000))
    possible = following & named if named else following
    if not possible:
        assert masks.stuck == {0: "the grammar lets none of allowed_token_ids follow"}
        assert not masks.rows
        return
    wanted = possible - bad - ({END, 7} if early else frozenset())
    assert set(np.flatnonzero(allowed(masks.bits[0], VOCAB))) == (wanted or possible)


def test_masks_pack_token_i_into_bit_i() -> None:
    assert packed([0, 33, 69], VOCAB).tolist() == [1, 2, 1 << 5]
    assert packed([31], 32).tolist() == [-(2**31)]


@pytest.mark.parametrize("limits", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.3}])
def test_a_masked_row_draws_what_it_draws_of_logits_that_are_minus_infinity_elsewhere(limits: dict[str, float]) -> None:
    params = SamplingParams(**limits)  # type: ignore[arg-type]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    matcher = Listed({(token,) for token in (1, 8, 33, 64, 69)}, VOCAB)
    plain, sampler = SampleSpec(params, 1, 0, (), (), False, (0, 1)), Sampler((END,))
    specs = [plain, spec_of(params, matcher), plain]
    drawn = sampler.sample(logits, specs, token_masks(specs, VOCAB, (END,)))
    masked = logits.clone()
    masked[1, [token for token in range(VOCAB) if token not in (1, 8, 33, 64, 69)]] = -torch.inf
    assert drawn == sampler.sample(masked, [plain] * 3)
    assert drawn != sampler.sample(logits, [plain] * 3)


class Bench(Scheduled):
    """A real model under a scheduler with few pages."""

    def __init__(self, num_pages: int = 40, depth: int = 1) -> None:
        model = load_model(CONFIG, dummy_weights(CONFIG), torch.float32)
        cache, limits = KvCache(num_pages, Paging.of(4), None), Limits(8, 64, 64, frozenset({END}))
        super().__init__(cache, limits, Isolating(Runner(model, num_pages, 4).run).run, depth)

    def add(self, number: int, matcher: Listed | None, n: int = 1, **params: object) -> Sequence:
        prompt = [random.Random(number).randrange(VOCAB) for _ in range(9)]
        settings = SamplingParams(seed=number, n=n, **params)  # type: ignore[arg-type]
        sequence = sequence_of(number, prompt, settings, matcher=matcher)
        self.scheduler.add(sequence)
        return sequence


@pytest.mark.parametrize("num_pages", [40, 6])  # with 6, sequences preempt each other
def test_answers_are_whole_sentences_of_their_grammars(num_pages: int) -> None:
    bench = Bench(num_pages)
    for number in range(4):
        bench.add(number, Listed(ANSWERS, VOCAB), n=1 + number % 2, temperature=2.0)
    bench.run()
    assert (bench.scheduler.num_preemptions > 0) == (num_pages == 6)
    assert len(bench.answers) == 6
    assert {tuple(answer) for answer in bench.answers.values()} <= ANSWERS
    assert set(bench.ends.values()) == {Finish.STOP}


def test_a_grammar_changes_nothing_for_others_in_the_step() -> None:
    alone, beside = Bench(), Bench()
    for bench in (alone, beside):
        bench.add(7, None, max_tokens=12, ignore_eos=True)
    beside.add(8, Listed(ANSWERS, VOCAB))
    beside.add(9, Listed({(1, 2), (3, 4)}, VOCAB))  # nothing follows their ends
    for bench in (alone, beside):
        bench.run()
    assert alone.answers[7, 0] == beside.answers[7, 0]
    assert beside.broken[9].is_stuck
    assert tuple(beside.answers[8, 0]) in ANSWERS


def test_an_answer_is_cut_by_max_tokens() -> None:
    bench = Bench()
    bench.add(1, Listed({(41, 42, 43, END)}, VOCAB), max_tokens=2)
    bench.run()
    assert bench.answers[1, 0] == [41, 42]
    assert bench.ends[1, 0] is Finish.LENGTH


def test_a_sequence_waits_until_its_grammar_is_compiled_and_nobody_waits_for_it() -> None:
    bench, matcher = Bench(), Listed(ANSWERS, VOCAB, is_ready=False)
    bench.add(1, matcher)
    bench.add(2, None, max_tokens=3, ignore_eos=True)
    bench.run()
    assert list(bench.answers) == [(2, 0)]
    matcher.is_ready = True
    bench.run()
    assert tuple(bench.answers[1, 0]) in ANSWERS


class Watched(Listed):
    """Notes the cores that its masks may be computed on."""

    cores: set[int]

    def fill(self, output_ids: Seq[int], bits: Bits) -> None:
        self.cores = os.sched_getaffinity(0)
        super().fill(output_ids, bits)


def test_masks_are_computed_beside_the_model_on_any_core() -> None:
    bench, matcher = Bench(), Watched(ANSWERS, VOCAB)
    bench.add(1, matcher)

    def compute() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as OpenMP binds the thread that computes
        bench.run()

    engine = threading.Thread(target=compute)
    engine.start()
    engine.join()
    assert matcher.cores == os.sched_getaffinity(os.getpid())


def test_what_came_before_is_copied_only_for_those_that_read_it() -> None:
    bench = Bench()
    sequence = bench.add(1, Listed(ANSWERS, VOCAB))
    sequence.tokens.append(41)
    (sample,) = sequence.samples()
    assert (list(sample.prompt_ids), list(sample.output_ids)) == ([], [41])
    penalized = bench.add(2, Listed(ANSWERS, VOCAB), repetition_penalty=2.0)
    (sample,) = penalized.samples()
    assert list(sample.prompt_ids) == list(penalized.job.token_ids)


def test_steps_without_grammars_have_no_masks() -> None:
    assert token_masks([spec()], VOCAB, (END,)) == NO_MASKS


@pytest.mark.parametrize("num_pages", [40, 7])
def test_steps_planned_ahead_give_the_answers_of_steps_one_by_one(num_pages: int) -> None:
    plain, benches = Bench(), [Bench(num_pages, depth) for depth in (1, 2)]
    plain.add(5, None, max_tokens=9, ignore_eos=True, temperature=0.0)
    plain.run()
    _, second, third, *_ = plain.answers[5, 0]
    for bench in benches:
        for number in range(3):
            bench.add(number, Listed(ANSWERS, VOCAB), n=1 + number % 2, temperature=2.0)
        bench.add(3, Listed({(41, 42), (7, 8, 9)}, VOCAB))  # nothing follows their ends
        bench.add(4, None, max_tokens=9, ignore_eos=True, repetition_penalty=3.0, temperature=0.0)
        bench.add(5, None, max_tokens=9, ignore_eos=True, temperature=0.0, bad_word_ids=((second, third),))
        bench.run()
    one_by_one, ahead = benches
    assert ahead.num_ahead >= 8
    assert (ahead.answers, ahead.ends) == (one_by_one.answers, one_by_one.ends)
    assert ahead.answers[5, 0][:2] == plain.answers[5, 0][:2]
    assert ahead.answers[5, 0] != plain.answers[5, 0]
    assert ahead.broken[3].is_stuck
    assert set(ahead.broken) == set(one_by_one.broken) == {3}
