"""Runs steps of every kind on a GPU that is not there; prints a line of JSON for each. Not for Triton's interpreter."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import torch
from made_heads import made_head, made_module, with_room
from recorded_device import DEVICE, recorded_device
from small_shapes import DELTA_NET, LATENTS, QWEN_3, SMALL

from pdserve.base.ids import PageId
from pdserve.engine.batch import PoolShape
from pdserve.engine.head_cuda import CudaHead
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, Phase, SampleSpec, StepPlan, Targets
from pdserve.engine.warm_up_steps import prompt_steps
from pdserve.model import loading
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.guessing_head import Head
from pdserve.model.ops_cuda import CudaOps
from pdserve.protocol.sampling import SamplingParams

PAGE_SIZE, NUM_PAGES, VOCAB = 64, 40, 512
LIMITS = Limits(max_num_seqs=7, max_num_batched_tokens=256, max_model_len=2048, eos_token_ids=frozenset({5}))
CONFIG = {**SMALL, **QWEN_3, "vocab_size": VOCAB, "head_dim": 64}
# Attention's pages have as many tokens in all of them.
CONFIG_OF_LATENTS = {**CONFIG, **LATENTS}
CONFIG_OF_STATES = {**CONFIG, **DELTA_NET, "linear_value_head_dim": 16}
SAMPLED = {
    "greedy": SamplingParams(temperature=0.0),
    "truncated": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    "penalized": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1),
    "biased": SamplingParams(logit_bias=((3, 1.5),)),
    "limited": SamplingParams(allowed_token_ids=(1, 2, 3)),
    "reported": SamplingParams(logprobs=3),
    "worded": SamplingParams(bad_word_ids=((1, 2),)),  # which the host reads, of the step before
}


def spec(params: SamplingParams, sequence: int, output: tuple[int, ...] = (), num_unknown: int = 0) -> SampleSpec:
    index = len(output) + num_unknown
    return SampleSpec(params, 1, index, (7, 8, 9), output, False, (sequence, 0), None, num_unknown > 0)


def prompt(first_page: int, count: int, *params: SamplingParams, targets: Targets | None = None) -> Chunk:
    pages = tuple(PageId(first_page + i) for i in range(-(-count // PAGE_SIZE)))
    return Chunk((4,) * count, 0, pages, tuple(spec(each, first_page) for each in params), targets=targets)


def token(first_page: int, position: int, params: SamplingParams, previous: int | None = None) -> Chunk:
    pages = tuple(PageId(first_page + i) for i in range(position // PAGE_SIZE + 1))
    sample = spec(params, first_page, (1,)) if previous is None else spec(params, first_page, (), 1)
    return Chunk((4,), position, pages, (sample,), Phase.DECODE, previous=previous)


def steps() -> Iterator[tuple[str, tuple[StepPlan, ...]]]:
    """Yield a name, and steps that are started together: the second may need tokens of the first."""
    for number, plan in enumerate(
        prompt_steps(LIMITS.max_num_batched_tokens, LIMITS.max_model_len, PoolShape(1, PAGE_SIZE, 1))
    ):
        yield f"warm-up {number}", (plan,)
    for name, params in SAMPLED.items():
        first = StepPlan((prompt(0, 70, params), prompt(4, 3, params)))
        yield name, (first, StepPlan((token(0, 70, params, 0), token(4, 3, params, 1))))
    everything = tuple(SAMPLED.values())
    singles = tuple(token(5 * i, 10 + i, params) for i, params in enumerate(everything))
    yield "all kinds", (StepPlan(singles), StepPlan((*singles, prompt(30, 100, everything[0]))))
    copies = ((PageId(1), PageId(2)), (PageId(3), PageId(4)))
    yield "copies", (StepPlan(singles, copies), StepPlan((), copies))
    scored = prompt(0, 40, everything[0], targets=Targets(tuple(range(1, 40)), 3))
    yield "scored", (StepPlan((scored,)),)


def with_states(plan: StepPlan) -> StepPlan:
    """Return a step with a second group of pages, of other pages of the pool."""
    chunks = [replace(c, other_pages=(tuple(PageId(NUM_PAGES - 1 - p) for p in c.pages),)) for c in plan.chunks]
    return replace(plan, chunks=tuple(chunks))


def runner_of(model: Model) -> CudaRunner:
    return CudaRunner(model, NUM_PAGES, PAGE_SIZE, LIMITS)


def model_of(config: Mapping[str, object]) -> Model:
    read = ModelConfig.from_hf(config)
    with mock.patch.object(loading, "ops_for", return_value=CudaOps()):
        return loading.load_model(read, loading.dummy_weights(read), torch.bfloat16, device=DEVICE)


class Guessing:
    """A runner with a head, which makes guesses behind a step of that name."""

    def __init__(self, model: Model, head: Head) -> None:
        self.runner = runner_of(with_room(model))
        self.head = CudaHead(head, self.runner, LIMITS)
        self.head.follow(self.runner, lambda take_in: take_in())

    def start(self, plan: StepPlan) -> None:
        self.runner.start(plan)

    def finish(self) -> None:
        self.runner.finish()

    def guess(self) -> None:
        plan = StepPlan((token(5, 11, SAMPLED["greedy"]), token(0, 10, SAMPLED["penalized"])))
        self.head.run(plan, self.head.features_of(np.array([330, 10])))


def main() -> None:
    model, latents, states = map(model_of, (CONFIG, CONFIG_OF_LATENTS, CONFIG_OF_STATES))
    head, module = Guessing(model, made_head(model, CudaOps())), Guessing(latents, made_module(latents, CudaOps()))
    found: list[tuple[str, CudaRunner | Guessing, tuple[StepPlan, ...]]] = []
    for last, runner, only in (
        ("", runner_of(model), ()),
        (", latents", runner_of(latents), ("warm-up 0", "greedy")),
        (", head", head, ()),
        (", module", module, ("warm-up 0", "all kinds")),
    ):
        found += [(f"{name}{last}", runner, plans) for name, plans in steps() if not only or name in only]
    keeping = runner_of(states)
    for name, plans in steps():
        if not name.startswith("warm-up"):
            found.append((f"{name}, states", keeping, tuple(map(with_states, plans))))
    for name, runner, plans in found:
        with recorded_device() as seen:
            for plan in plans:
                runner.start(plan)
            for _ in plans:
                runner.finish()
        sys.stdout.write(json.dumps({"step": name, **asdict(seen)}) + "\n")
    for name, guessing in (("guesses of a head", head), ("guesses of a module", module)):
        with recorded_device() as seen:
            guessing.guess()
        sys.stdout.write(json.dumps({"step": name, **asdict(seen)}) + "\n")


if __name__ == "__main__":
    main()
