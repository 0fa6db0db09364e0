"""What a prefill and a decode worker answer whose K and V differ in type: two engines, and rows rounded in between."""

from dataclasses import dataclass
from pathlib import Path

import torch
from greedy_runs import spec
from model_zoo import prompt

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.offline import TIED_CODED
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.loading import describe_layout
from pdserve.kvtransfer.conversion import conversion_between
from pdserve.model.loading import load_model
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams

PAGE_SIZE, MOST_TOKENS = 16, 1024
BEST_TWO = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2)


@dataclass
class UnlikeEngines:
    """Greedy answers in float32 of one that computes prompts, and of another that goes on from its pages."""

    folder: Path
    codes: tuple[KvCode | None, KvCode | None]
    least_lead: float = 1.0  # of the tokens of the last answer, over the next likeliest

    def __post_init__(self) -> None:
        checkpoint = open_directory(self.folder)
        self._model = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
        self._runners = [Runner(self._model, MOST_TOKENS // PAGE_SIZE, PAGE_SIZE, code=code) for code in self.codes]
        layouts = [describe_layout(self._model.config, "", PAGE_SIZE, code or "float32", "cpu") for code in self.codes]
        self._conversion = conversion_between(*layouts)

    def answer(self, asked: list[int], num_tokens: int) -> list[int]:
        self.least_lead, (prefill, decode) = 1.0, self._runners
        found = [self._next(prefill, asked, 0)]
        pages = prefill.kv.flatten(1).view(torch.uint8)
        decode.kv.flatten(1).view(torch.uint8).copy_(pages if self._conversion is None else self._conversion.of(pages))
        while len(found) < num_tokens:
            found.append(self._next(decode, found[-1:], len(asked) + len(found) - 1))
        return found

    def _next(self, runner: Runner, tokens: list[int], start: int) -> int:
        pages = [PageId(page) for page in range(MOST_TOKENS // PAGE_SIZE)]
        drawn = runner.run(StepPlan((Chunk(tokens, start, pages, (spec((), BEST_TWO),)),))).tokens[0][0][0]
        assert drawn.logprobs is not None
        (_, best), (_, second) = drawn.logprobs.top[:2]
        self.least_lead = min(self.least_lead, best - second)
        return drawn.token_id

    def untied(self, first_length: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Return a prompt of about so many tokens, and its answer, which no other order of sums changes."""
        for length in range(first_length, first_length + 40):
            answer = self.answer(prompt(length), num_tokens)
            if self.least_lead >= TIED_CODED:
                return prompt(length), answer
        raise AssertionError("every prompt has a tie")
