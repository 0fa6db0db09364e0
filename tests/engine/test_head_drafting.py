"""A head changes no token, and guesses what it is defined to guess, whoever has computed what it attends to."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle3_heads import (
    Tensors,
    guesses_of,
    head_config,
    longest_walks,
    random_head,
    write_forgetful_model,
    write_head,
    write_head_that_looks_back,
)
from guessing_bench import (
    END,
    MOST,
    REPEATED,
    VOCAB,
    Bench,
    add_requests,
    answered_alike,
    assert_same,
    ids,
)
from held_weights import held, read_all, scaled
from knowing_heads import Knowing
from long_cases import long
from model_zoo import load_oracle, write_model
from model_zoo import prompt as zoo_prompt
from small_models import small_config, small_model
from small_shapes import FOUR_HEADS, SMALL
from torch import Tensor

from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.decode_programs import DecodePrograms
from pdserve.engine.features import Features
from pdserve.engine.head_drafting import HeadDrafter
from pdserve.engine.runner import Runner
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, StepResult
from pdserve.executor.head_files import open_head
from pdserve.model.decoder import Decoder
from pdserve.model.eagle3 import Eagle3Head
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
LAYERS = (0, 1, 2)
SHAPE = {**SMALL, **FOUR_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 2048}  # of `small_config`


def with_room(model: Model) -> Model:
    assert isinstance(model, Decoder)
    return replace(model, config=replace(model.config, num_head_layers=1))


@pytest.fixture(scope="module")
def model() -> Model:
    return with_room(small_model(small_config(VOCAB, eos_token_id=END, num_hidden_layers=3)))


@pytest.fixture(scope="module")
def head(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    """Return a head of random weights, which is nearly always wrong."""
    config = head_config(SHAPE, 60, LAYERS)
    return open_head(write_head(tmp_path_factory.mktemp("head"), config, random_head(config)), model.config).load(model)


@pytest.fixture(scope="module")
def forgetful() -> Model:
    return forgetful_model()


def forgetful_model(dtype: torch.dtype = torch.float32, quantization: ChosenQuantization = "none") -> Model:
    """Return a model whose next token depends on the last one alone."""
    config = small_config(VOCAB, eos_token_id=END, num_hidden_layers=3)
    weights = read_all(scaled(dummy_weights(config)))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    return with_room(load_model(config, in_form(held(weights), quantization), dtype))


def right_head(model: Model, folder: Path, quantization: ChosenQuantization = "none") -> Eagle3Head:
    """Return the head that guesses what a forgetful model samples.

    A token attends to its own kind alone, since queries are multiples of keys. So the layer's output is the embedding
    of the token that follows, which it takes in.
    """
    config = head_config(SHAPE, VOCAB, LAYERS, norm_before_residual=True)
    head = {name: torch.zeros_like(each) for name, each in random_head(config).items()}
    eye = torch.eye(64)
    for place in range(4):  # heads 0 and 1 have the first half of k and v, 2 and 3 the other one
        half = slice(place // 2 * 32, place // 2 * 32 + 32)
        head["midlayer.self_attn.q_proj.weight"][place * 32 : place * 32 + 32, :64] = 40 * eye[half]
    for name in "kv":
        head[f"midlayer.self_attn.{name}_proj.weight"][:, :64] = eye
    for place in (0, 2):
        half = slice(place // 2 * 32, place // 2 * 32 + 32)
        head["midlayer.self_attn.o_proj.weight"][half, place * 32 : place * 32 + 32] = torch.eye(32)
    for name in ("midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        head[f"{name}.weight"] += 1
    weights = read_all(scaled(dummy_weights(model.config)))
    head |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
    del head["d2t"], head["t2d"]
    return open_head(write_head(folder, config, head), model.config).load(model, quantization)


@pytest.mark.parametrize("num_pages", [*long(300), 14])  # with 14, they preempt each other
@pytest.mark.parametrize("is_right", [True, False])
def test_answers_are_those_without_a_head_in_tokens_ends_and_scores(
    model: Model, head: Eagle3Head, is_right: bool, num_pages: int
) -> None:
    plain = add_requests(Bench(model)).run()
    make = type("Made", (Knowing,), {"known": plain.answers}) if is_right else HeadDrafter
    bench = add_requests(Bench(model, num_pages, head=head, head_drafter=make)).run()
    assert_same(bench, plain)
    assert bench.counts["guesses"] > 50
    assert bench.counts["right"] > 0.9 * bench.counts["guesses"] or not is_right
    assert bool(bench.scheduler.num_preemptions) == (num_pages == 14)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, "none"),
        (torch.float32, "int8"),
        (torch.bfloat16, "none"),
        *long((torch.float16, "none"), (torch.bfloat16, "int8"), (torch.bfloat16, "int4"), (torch.float32, "int4")),
    ],
)
def test_a_head_that_can_be_right_is_right_with_penalties_noise_and_grammars(
    tmp_path: Path, dtype: torch.dtype, quantization: ChosenQuantization
) -> None:
    model = forgetful_model(dtype, quantization)
    head, plain = right_head(model, tmp_path, quantization), add_requests(Bench(model)).run()
    bench = add_requests(Bench(model, head=head)).run()
    assert ids(bench.answers) == ids(plain.answers)
    num_wrong = 3.0  # ends of answers with a grammar, behind which nothing follows
    if (dtype, quantization) != (torch.float32, "none"):
        num_wrong += 0.1 * bench.counts["guesses"]  # the head rounds otherwise
    assert bench.counts["guesses"] - num_wrong <= bench.counts["right"] > 100
    assert bench.counts["steps"] < plain.counts["steps"]


def test_a_head_takes_in_what_a_step_has_computed_in_one_pass_and_nothing_else(
    model: Model, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, steps, hidden = list[int](), list[tuple[int, list[int]]](), Eagle3Head.hidden
    monkeypatch.setattr(
        Eagle3Head, "hidden", lambda own, ids, *rest: (passes.append(len(ids)), hidden(own, ids, *rest))[1]
    )

    class Counted(HeadDrafter):
        def take_in(self, plan: StepPlan, result: StepResult) -> None:
            del passes[:]
            super().take_in(plan, result)
            steps.append((plan.num_tokens, passes[:]))

    add_requests(Bench(model, head=head, head_drafter=Counted)).run()
    assert max(num_tokens for num_tokens, _ in steps) == 64, "the limit of a step"
    assert any(taken == [num_tokens] for num_tokens, taken in steps)
    assert all(len(taken) <= 1 and sum(taken) <= num_tokens for num_tokens, taken in steps)


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=1.0, top_p=0.95, seed=5)])
def test_one_answer_takes_as_many_steps_as_a_heads_right_guesses_leave(
    forgetful: Model, tmp_path: Path, params: SamplingParams
) -> None:
    bench = Bench(forgetful, head=right_head(forgetful, tmp_path))
    bench.add(0, [10 + place % 70 for place in range(120)], params)
    bench.run()
    assert bench.counts["steps"] <= 2 + 12 + 60 / (MOST + 1)  # two for the prompt; twelve: costs and gains are learnt
    assert bench.counts["right"] == bench.counts["guesses"]


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.bfloat16, "none"), (torch.float32, "int8"), (torch.bfloat16, "int4")]
)
def test_features_are_those_of_a_forward_pass_where_programs_compute_decode_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quantization: ChosenQuantization
) -> None:
    monkeypatch.setattr("pdserve.model.ops_cpu._has_matrix_units", lambda: False)  # which oneDNN would multiply with
    greedy = SampleSpec(GREEDY, 0, 0, (), (), forbid_stops=False, sequence=(0, 0))
    model = with_room(small_model(small_config(VOCAB, num_hidden_layers=3), dtype, quantization))
    own = head_config(SHAPE, 60, LAYERS)
    head = open_head(write_head(tmp_path, own, random_head(own)), model.config).load(model, quantization)
    rows = tuple(Chunk((20 + row,), 0, (row,), (greedy,), Phase.DECODE) for row in range(3))
    computed_by, program_logits = list[int](), DecodePrograms.logits
    monkeypatch.setattr(DecodePrograms, "logits", lambda *of: (computed_by.append(1), program_logits(*of))[1])
    kept = []
    for more in ((), (Chunk((50, 51), 0, (3,), ()),)):  # with a prompt's chunk, a step is no program
        runner, features = Runner(model, 8, 16), Features(head.taps, 8, 16)
        runner.keep(features)
        runner.run(StepPlan((*rows, *more)))
        kept.append(features.of(np.array([0, 16, 32])).clone())
    assert computed_by == [1]
    assert torch.equal(*kept)
    assert len(kept[0].unique(dim=0)) == 3


@dataclass
class Oracle:
    """A model as transformers computes it, and what a head guesses from that."""

    model: Model
    head: Eagle3Head
    config: Mapping[str, Any]
    tensors: Tensors
    states_of: Callable[[Seq[int]], Tensor]
    embedding: Tensor

    def check(self, bench: Bench, sequences: set[int], least: int = 3) -> None:
        """Check all that was guessed of greedy sequences."""
        count = 0
        for sequence, known, guesses in bench.drafted:
            if sequence.order in sequences and guesses:
                states, count = self.states_of(known[:-1]), count + 1
                wanted = guesses_of(self.config, self.tensors, self.embedding, states, known, len(guesses))
                assert list(guesses) == wanted, f"{len(known)} tokens"
        assert count >= least


def oracle_of(family: str, folder: Path, **own: object) -> Oracle:
    written = write_model(family, folder / "model", num_hidden_layers=3)  # more with windows than others, if any
    config = head_config(json.loads((written / "config.json").read_text()), 200, LAYERS, **own)
    tensors, checkpoint, oracle = random_head(config), open_directory(written), load_oracle(written)
    model = with_room(load_model(checkpoint.config, checkpoint.weights(), torch.float32))

    @torch.inference_mode()
    def states_of(tokens: Seq[int]) -> Tensor:
        states = oracle(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.stack([states[layer][0] for layer in LAYERS])

    head = open_head(write_head(folder / "head", config, tensors), model.config).load(model)
    return Oracle(model, head, config, tensors, states_of, oracle.get_input_embeddings().weight.detach())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return oracle_of("llama3", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", ["gemma2", *long("qwen2", "qwen3", "qwen3-moe", "gpt-oss")])
def test_a_head_guesses_what_it_is_defined_to_guess_beside_each_family(tmp_path: Path, family: str) -> None:
    oracle = oracle_of(family, tmp_path, norm_before_residual=family == "qwen3")
    plain, bench = Bench(oracle.model, 200), Bench(oracle.model, 200, head=oracle.head)
    answered_alike(plain, bench, *[(zoo_prompt(length, seed=n), GREEDY) for n, length in enumerate((150, 30, 17))])
    assert len(bench.runner.groups) == (2 if family in ("gemma2", "gpt-oss") else 1)
    oracle.check(bench, {0, 1, 2}, 30)


def test_a_head_has_taken_in_a_prefix_that_another_sequence_left(llama: Oracle) -> None:
    bench = Bench(llama.model, head=llama.head)
    for number in range(3):
        bench.add(number, [*zoo_prompt(64), 20, 30 + number], replace(GREEDY, max_tokens=9))
        bench.run()
    assert bench.drafted[-1][0].num_cached_tokens == 64
    llama.check(bench, {1, 2})


def test_a_head_takes_in_what_is_computed_again_after_a_preemption(llama: Oracle) -> None:
    bench = Bench(llama.model, 14, head=llama.head)
    for number in range(6):
        bench.add(number, zoo_prompt(20, seed=number), GREEDY)
    bench.run()
    assert bench.scheduler.num_preemptions
    llama.check(bench, set(range(6)))


def test_a_head_has_taken_in_a_prompt_that_another_worker_computed(llama: Oracle) -> None:
    assert_guesses_after_a_hand_off(llama, Bench(llama.model, head=llama.head))


def test_a_head_that_failed_once_still_takes_in_the_prompts_of_other_workers(llama: Oracle) -> None:
    class FailingOnce(HeadDrafter):
        has_failed = False

        def take_in(self, plan: StepPlan, result: StepResult) -> None:
            if not FailingOnce.has_failed:
                FailingOnce.has_failed = True
                raise MemoryError("once")
            super().take_in(plan, result)

    one = Bench(llama.model, head=llama.head, head_drafter=FailingOnce)
    one.add(9, zoo_prompt(40, seed=3), replace(GREEDY, max_tokens=2))
    one.run()
    assert one.counts["draft failures"] == FailingOnce.has_failed == 1
    assert_guesses_after_a_hand_off(llama, one)


def assert_guesses_after_a_hand_off(llama: Oracle, one: Bench) -> None:
    """Check what another worker guesses of a prompt that this one computes."""
    other = Bench(llama.model, head=llama.head)
    one.add(0, zoo_prompt(70), GREEDY)
    (sent,) = one.scheduler.waiting
    sent.stop_after_prompt = sent.ends_with_prompt = True
    while (plan := one.scheduler.plan()) is not None:
        one.commit(plan, one.compute(plan))
    other.runner.kv.normal_()
    pages = other.scheduler.cache.take(len(sent.pages.runs[0]))
    assert pages is not None
    other.runner.kv[list(pages)] = one.runner.kv[sent.pages.runs[0]]
    tokens = [*sent.tokens, one.answers[0, 0][0].token_id]
    tables = PageTables((list(pages),))
    arrived = Sequence(sent.job, (0,), tokens, 0, phase=Phase.DECODE, computed=70, pages=tables)
    other.scheduler.join(arrived)
    other.run()
    llama.check(other, {0})
    assert len(other.drafted[0][1]) == 72, "the first guesses are of the first step"


def test_the_first_continuation_of_a_prompt_is_guessed_for_as_if_it_were_alone(llama: Oracle) -> None:
    bench = Bench(llama.model, head=llama.head)
    bench.add(0, zoo_prompt(40), replace(GREEDY, n=2))
    bench.run()
    bench.drafted = [each for each in bench.drafted if each[0].indices == (0,)]
    llama.check(bench, {0})


def test_no_guesses_of_a_head_are_made_beyond_its_longest_sequence(forgetful: Model, tmp_path: Path) -> None:
    plain = Bench(forgetful)
    bench = Bench(forgetful, head=right_head(forgetful, tmp_path), draft_model_len=50)
    answered_alike(plain, bench, (REPEATED, GREEDY))
    assert 40 < max(len(known) + len(guesses) for _, known, guesses in bench.drafted if guesses) <= 50


@pytest.mark.parametrize("are_kept", [True, False])
def test_a_head_that_looks_back_is_right_by_the_pages_of_the_prompt_alone(tmp_path: Path, *, are_kept: bool) -> None:
    tensors, checkpoint = write_forgetful_model(tmp_path), open_directory(tmp_path)
    model = with_room(load_model(checkpoint.config, checkpoint.weights(), torch.float32))
    path, walks = write_head_that_looks_back(tmp_path / "head", tmp_path, tensors), longest_walks(tensors, 6)
    bench = Bench(model, head=open_head(path, model.config).load(model))
    for number, walk in enumerate(walks):
        bench.add(number, [*walk * 2, walk[0]], replace(GREEDY, max_tokens=len(walk) - 1))
    while (plan := bench.scheduler.plan()) is not None:
        result = bench.compute(plan)
        for chunk in plan.chunks:
            if chunk.phase is Phase.PROMPT and not are_kept:
                bench.runner.kv[list(chunk.pages), -1] = 0
        bench.commit(plan, result)
    assert [ids(bench.answers)[number, 0] for number in range(6)] == [walk[1:] for walk in walks]
    assert bench.counts["right"] == (bench.counts["guesses"] if are_kept else 0)
    assert bench.counts["guesses"] > 50


def test_kv_of_a_head_that_others_overwrite_spoils_guesses_alone(llama: Oracle) -> None:
    plain, bench = Bench(llama.model), Bench(llama.model, head=llama.head)
    for each in (plain, bench):
        each.add(0, zoo_prompt(70), GREEDY)
    while (plan := bench.scheduler.plan()) is not None:
        result = bench.compute(plan)
        bench.runner.kv[:, -1].normal_()
        bench.commit(plan, result)
    assert ids(bench.answers) == ids(plain.run().answers)
    with pytest.raises(AssertionError, match="tokens"):
        llama.check(bench, {0})


def test_a_head_that_fails_is_given_up_and_ends_no_request(model: Model, head: Eagle3Head) -> None:
    class Failing(HeadDrafter):
        num_drafts = 0

        def draft(self, plan: StepPlan, result: StepResult) -> Mapping[int, tuple[int, ...]]:
            Failing.num_drafts += 1
            if self.num_drafts > 4:
                raise RuntimeError("broken on purpose")
            return super().draft(plan, result)

    plain, bench = add_requests(Bench(model)).run(), add_requests(Bench(model, head=head, head_drafter=Failing)).run()
    assert ids(bench.answers) == ids(plain.answers)
    assert not bench.broken
    assert Failing.num_drafts == 5
    assert bench.counts["draft failures"] == 1
    assert bench.counts["timed take-ins"] == bench.counts["steps"], "others may get its pages"
    assert bench.counts["ahead"] > 0, "steps are planned ahead again"


def test_a_head_that_is_wrong_is_used_less_and_less(model: Model, head: Eagle3Head) -> None:
    plain, bench = Bench(model), Bench(model, head=head)
    answered_alike(plain, bench, (REPEATED, replace(GREEDY, max_tokens=300)))
    assert bench.counts["guesses"] < 150
