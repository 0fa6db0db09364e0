"""What workers answer whose K and V differ in type: an engine for each, and rows rounded between them."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from greedy_runs import spec
from loaded_models import loaded_model
from model_zoo import prompt

from pdserve.base.ids import PageId
from pdserve.engine.offline import TIED_CODED
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.layouts import describe_layout
from pdserve.kvtransfer.conversion import conversion_between
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams

PAGE_SIZE, MOST_TOKENS = 16, 1024
PAGES = [PageId(page) for page in range(MOST_TOKENS // PAGE_SIZE)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass
class UnlikeEngines:
    """Greedy answers in float32 of one that computes prompts, and of others that go on from each other's pages."""

    folder: Path
    codes: tuple[KvCode | None, ...]
    allowed: tuple[int, ...] = ()  # only these tokens are drawn; empty: all
    leads: list[float] = field(default_factory=list)  # of the tokens of the last answer, over the next likeliest

    def __post_init__(self) -> None:
        model = loaded_model(self.folder)
        num_top = model.config.vocab_size if self.allowed else 2
        self._params = replace(GREEDY, allowed_token_ids=self.allowed, logprobs=num_top)
        self._runners = [Runner(model, len(PAGES), PAGE_SIZE, code=code) for code in self.codes]
        layouts = [describe_layout(model.config, "", PAGE_SIZE, code or "float32", "cpu") for code in self.codes]
        self._conversions = [conversion_between(*each) for each in pairwise(layouts)]

    def answer(self, asked: list[int], num_tokens: int, *moved_at: int) -> list[int]:
        """Return an answer. moved_at: how many tokens it has when it moves from one decode worker to the next."""
        self.leads = []
        found = [self._next(self._runners[0], asked, 0)]
        ends = (*moved_at, num_tokens)
        for conversion, (source, target), end in zip(self._conversions, pairwise(self._runners), ends, strict=True):
            pages = source.kv.flatten(1).view(torch.uint8)
            target.kv.flatten(1).view(torch.uint8).copy_(pages if conversion is None else conversion.of(pages))
            while len(found) < end:
                found.append(self._next(target, found[-1:], len(asked) + len(found) - 1))
        return found

    @property
    def num_sure(self) -> int:
        """Return how many tokens of the last answer no other order of sums changes."""
        return next((number for number, lead in enumerate(self.leads) if lead < TIED_CODED), len(self.leads))

    def untied(self, first_length: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Return a prompt of about so many tokens, and its answer, which no other order of sums changes."""
        for length in range(first_length, first_length + 40):
            answer = self.answer(prompt(length), num_tokens)
            if self.num_sure == num_tokens:
                return prompt(length), answer
        raise AssertionError("every prompt has a tie")

    def untied_after(self, begun: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
        """Return a prompt that goes on behind another one, and its answer, which no other order of sums changes."""
        for last in range(40):
            asked = [*begun, 7, last]
            answer = self.answer(asked, num_tokens)
            if self.num_sure == num_tokens:
                return asked, answer
        raise AssertionError("every prompt has a tie")

    def _next(self, runner: Runner, tokens: list[int], start: int) -> int:
        drawn = runner.run(StepPlan((Chunk(tokens, start, PAGES, (spec((), self._params),)),))).tokens[0][0][0]
        assert drawn.logprobs is not None
        likeliest = [each for each in drawn.logprobs.top if not self.allowed or each[0] in self.allowed]
        (_, best), (_, second) = likeliest[:2]
        self.leads.append(best - second)
        return drawn.token_id
