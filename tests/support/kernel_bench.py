"""Requests that the kernels' runner answers, behind a worker's executor, with guesses of any kind."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from guessing_bench import END, PAGE_SIZE, REPEATED, VOCAB, Bench
from listed_answers import Listed
from small_models import small_config, small_model

from pdserve.engine.drafting import Drafter, ModelDrafter, limits_of_passes
from pdserve.engine.head_cuda import CudaHead
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.step import StepPlan, StepResult
from pdserve.executor.local import LocalExecutor
from pdserve.model.family import Model
from pdserve.protocol.sampling import SamplingParams

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=1)
PENALIZED = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, repetition_penalty=1.3, logprobs=1)
LISTED = {(20, 21, 22, 23, 24, 25, 60, END), (20, 21, 22, 23, 30, 31, 32, 61, END)}
MIXED = (  # the last goes with a grammar
    GREEDY,
    SamplingParams(seed=3, temperature=0.8, top_k=9, n=2, max_tokens=10, min_tokens=4, logprobs=0),
    SamplingParams(seed=4, max_tokens=9, ignore_eos=True, bad_word_ids=((9, 10), (33,)), logit_bias=((12, 4.0),)),
    PENALIZED,
    SamplingParams(seed=8, max_tokens=10, ignore_eos=True, frequency_penalty=0.7, presence_penalty=0.4, n=2),
    SamplingParams(seed=5, temperature=2.0),
)


def one_layer(**sizes: int) -> Model:
    """Return a model that Triton's interpreter computes in no time."""
    return small_model(small_config(VOCAB, eos_token_id=END, num_key_value_heads=1, **{**SIZES, **sizes}))


@dataclass
class KernelBench(Bench):
    """A model on the kernels' runner, with steps in flight, and what guesses beside it."""

    drafter_on_kernels: Drafter | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = self.scheduler.limits
        kernels = self.kernels = CudaRunner(self.model, self.num_pages, PAGE_SIZE, limits)
        assert kernels.groups == self.runner.groups
        if self.draft is not None:
            passes = CudaRunner(self.draft, self.num_pages, kernels.groups[0].page_size, limits_of_passes(limits))
            self.drafter_on_kernels = ModelDrafter(passes)
        elif self.head is not None:
            head = CudaHead(self.head, kernels, limits)
            self.drafter_on_kernels = self.head_drafter(head)
            head.follow(kernels, self.drafter_on_kernels.attempt)
        self.executor = LocalExecutor(kernels, ThreadPoolExecutor(1), drafter=self.drafter_on_kernels)

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        return self.executor.start(plan).result

    def run(self) -> "Bench":
        try:
            return super().run()
        finally:
            self.executor.close()


def answered(bench: Bench, *asked: SamplingParams, matcher: Listed | None = None, prompt: Seq[int] = REPEATED) -> Bench:
    """Answer requests, the last of which has a grammar if there is a matcher."""
    for number, params in enumerate(asked):
        is_last = number == len(asked) - 1
        bench.add(number, [*prompt, 14 + number], params, matcher if is_last else None)
    return bench.run()


def answered_mixed(bench: Bench) -> Bench:
    """Answer requests of all kinds, whose prompts are so short that a draft model lacks few tokens from the start."""
    return answered(bench, *MIXED, matcher=Listed(LISTED, VOCAB), prompt=REPEATED[:2])


def assert_same_drafts(bench: Bench, on_cpu: Bench) -> None:
    """Check that a head on kernels has guessed what it guesses on a CPU."""
    ours, theirs = ([(known, guesses) for _, known, guesses in each.drafted] for each in (bench, on_cpu))
    assert ours == theirs


def assert_same_kv(bench: KernelBench, on_cpu: Bench) -> None:
    """Check that both have written the same KV, of the model and of a head: one wrong row may change no guess."""
    torch.testing.assert_close(bench.kernels.kv, on_cpu.runner.kv, rtol=1e-4, atol=1e-4)
