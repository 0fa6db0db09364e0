"""How often a draft model is right, with the model's noise and with its own, and what it gains."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lab.speculating import PAGE_SIZE, Answering, answered, in_turn, scheduler_of, trial_of
from pdserve.base.ids import PageId
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import Checkpoint, choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.batch import Batch
from pdserve.engine.drafting import ModelDrafter
from pdserve.engine.guesses import DraftsBy
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, SampleSpec, StepPlan, StepResult
from pdserve.engine.verification import Run, verifying
from pdserve.model.config import ModelConfig
from pdserve.model.loading import load_model
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.sampling import SamplingParams
from pdserve.settings.config import Quantization

_LONGEST, _GUESSES = 512, 5
_ASKED, _ANSWERED = 160, 80  # tokens
_TEMPERATURES = (0.0, 0.5, 1.0)
_COMPARED = 4  # texts after which guesses are counted
_OTHER_SEED = 0x5DEECE66D


@value
class Drafted:
    """Guesses after texts, and CPU seconds of all answers after their prompts."""

    num_layers: int
    num_streams: int
    temperature: float
    share_right: float  # of guesses that were compared, with the model's own noise
    share_right_apart: float  # with noise of its own
    share_by_rejection: float  # that rejection sampling would keep: 1 - TV, the mean over the answers' tokens
    least_share: float  # with the model's noise, whatever the distributions: the mean of (1 - TV) / (1 + TV)
    without_s: float
    with_s: float
    speedup: float  # median over rounds
    num_guesses: int  # verified in the last round, where these seemed worth it
    num_equal: int  # answers of the last round that are the same as without, of 8


class DraftBench:
    """A model, and a draft model that is its first layers."""

    def __init__(
        self, path: Path, dtype: str, quantizations: tuple[Quantization, Quantization], sizes: tuple[int, int]
    ) -> None:
        """quantizations: of the model's weights, and of the draft model's. sizes: its layers, and answers at once."""
        checkpoint = open_checkpoint(path)
        self._num_layers, self._num_streams = sizes
        self._runner, self._draft_runner = (
            self._loaded(checkpoint, dtype, form, count)
            for form, count in zip(quantizations, (checkpoint.config.num_layers, self._num_layers), strict=True)
        )
        self._tokenizer = checkpoint.tokenizer()
        self._trial = trial_of(self._runner)

    def _loaded(self, checkpoint: Checkpoint, dtype: str, quantization: Quantization, num_layers: int) -> Runner:
        """Load the first layers, embedding and head."""
        num_pages = self._num_streams * _LONGEST // PAGE_SIZE
        weights = weights_in_form(checkpoint, choose_quantization(quantization, checkpoint, dtype, "cpu"))
        config = ModelConfig.from_hf({**checkpoint.raw_config, "num_hidden_layers": num_layers})
        kept = {name: stored for name, stored in weights.items() if _layer(name) < num_layers}
        return Runner(load_model(config, kept, getattr(torch, dtype)), num_pages, PAGE_SIZE, ())

    def measure(self, texts: Sequence[str], rounds: int) -> Iterator[Drafted]:
        """Let the model go on after the beginnings of texts, at a few temperatures."""
        prompts = [self._tokenizer.encode(text, add_special=False)[:_ASKED] for text in texts]
        for temperature in _TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=_ANSWERED, ignore_eos=True)
            shared, apart = (self._share_right(prompts[:_COMPARED], params, noise) for noise in (0, _OTHER_SEED))
            by_rejection, least = self._kept_by_rejection(prompts[:_COMPARED], params)
            plain, guessing = partial(self._answer, prompts, params, None), partial(self._guess, prompts, params)
            _, gain = in_turn(plain, guessing, rounds)
            yield Drafted(self._num_layers, self._num_streams, temperature, shared, apart, by_rejection, least, *gain)

    def _kept_by_rejection(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, float]:
        """Return `share_by_rejection` and `least_share`. TV: how far the two models' distributions are apart."""
        answers, apart = self._answer(prompts, params, None).answers, list[Tensor]()
        for number, prompt in enumerate(prompts):
            token_ids, places = [*prompt, *answers[number]], slice(len(prompt) - 1, -1)
            own, drafted = (
                _distributions(runner, token_ids, params)[places] for runner in (self._runner, self._draft_runner)
            )
            apart.append((own - drafted).abs().sum(-1) / 2)
        kept = 1 - torch.cat(apart)
        return kept.mean().item(), (kept / (2 - kept)).mean().item()

    def _share_right(self, prompts: Sequence[Sequence[int]], params: SamplingParams, noise: int) -> float:
        """Return how many of the guesses that were compared were right, where all of them are verified."""
        drafting, num_right, num_wrong = self._drafting(noise), 0, 0

        def run(plan: StepPlan) -> StepResult:
            nonlocal num_right, num_wrong
            result = drafting(plan)
            for chunk, tokens in zip(plan.chunks, result.tokens, strict=True):
                if chunk.num_drafts:
                    num_right += len(tokens[0]) - 1
                    num_wrong += len(tokens[0]) - 1 < chunk.num_drafts
            return replace(result, elapsed_s=0.01, draft_s=1e-6)  # as if guesses cost nothing

        self._answer(prompts, params, run)
        return num_right / (num_right + num_wrong)

    def _drafting(self, noise: int) -> Run:
        """Return what runs steps and drafts, with the seeds of draws changed by this much."""

        def reseeded(spec: SampleSpec) -> SampleSpec:
            return replace(spec, seed=spec.seed ^ noise)

        class Reseeded:
            kv = self._draft_runner.kv
            own = self._draft_runner

            def run(self, plan: StepPlan) -> StepResult:
                chunks = [replace(each, samples=tuple(map(reseeded, each.samples))) for each in plan.chunks]
                return self.own.run(StepPlan(tuple(chunks)))

        return ModelDrafter(Reseeded() if noise else self._draft_runner).beside(verifying(self._runner.run))

    def _guess(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Answering:
        return self._answer(prompts, params, self._drafting(0))

    def _answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams, run: Run | None) -> Answering:
        """Answer prompts, a few at once; without `run`, without guesses."""
        limits = Limits(self._num_streams, _LONGEST, _LONGEST, frozenset())
        if run is not None:
            limits = replace(
                limits, num_speculative_tokens=_GUESSES, guesser=DraftsBy(DraftSource.DRAFT_MODEL, _LONGEST)
            )
        scheduler, run = scheduler_of(limits, self._runner, self._trial), run or self._runner.run
        answered(scheduler, run, prompts[: self._num_streams], params)  # with these, costs are learnt
        return answered(scheduler, run, prompts, params)


@torch.inference_mode()
def _distributions(runner: Runner, token_ids: Sequence[int], params: SamplingParams) -> Tensor:
    """Return what a model samples from behind each token: [num_tokens, vocab_size]."""
    pages = tuple(map(PageId, range(-(-len(token_ids) // PAGE_SIZE))))
    batch = Batch.of(StepPlan((Chunk(tuple(token_ids), 0, pages, ()),)), runner._pool)
    logits = runner.model.forward(runner._planned(batch), runner._attention, None).float()
    if not params.temperature:
        return one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / params.temperature).softmax(-1)


def _layer(name: str) -> int:
    """Return the layer whose weight has this name; -1 for one of none."""
    _, _, place = name.partition("model.layers.")
    return int(place.partition(".")[0]) if place else -1
