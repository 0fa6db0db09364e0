"""Greedy texts from a bare runner, with plans written by hand: no scheduler between the test and the runner."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

from pdserve.base.ids import PageId
from pdserve.engine.runner import EngineRunner
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
from pdserve.model.layer_groups import LayerGroup
from pdserve.protocol.sampling import SampledToken, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
BEST_TWO = SamplingParams(temperature=0.0, max_tokens=64, logprobs=2)


def spec(output_ids: Seq[int] = (), params: SamplingParams = GREEDY, seed: int = 0) -> SampleSpec:
    return SampleSpec(params, seed, len(output_ids), (), output_ids, forbid_stops=False, sequence=(0, seed))


@dataclass
class Text:
    """A prompt and what has been drawn after it; pages are taken from one shared, shuffled supply."""

    prompt: list[int]
    pages: list[list[PageId]]  # of each group of layers
    params: SamplingParams = GREEDY
    answer: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)  # of drawn tokens over the next likeliest, if they are asked for
    computed: int = 0

    def num_sure(self, tied: float) -> int:
        """Return how many tokens from the first one on lead by as much as this, in log probabilities."""
        return next((number for number, lead in enumerate(self.leads) if lead < tied), len(self.leads))

    def take(self, drawn: Seq[SampledToken]) -> None:
        for token in drawn:
            self.answer.append(token.token_id)
            if token.logprobs is not None:
                (_, best), (_, second) = token.logprobs.top[:2]
                self.leads.append(best - second)

    def chunk(self, groups: Seq[LayerGroup], most: int) -> Chunk:
        tokens = self.prompt + self.answer
        stop = min(len(tokens), self.computed + most)
        samples = (spec(tuple(self.answer), self.params),) if stop == len(tokens) else ()
        first, *others = [self._row(*each, stop) for each in zip(groups, self.pages, strict=True)]
        return Chunk(tokens[self.computed : stop], self.computed, first, samples, other_pages=tuple(others))

    def _row(self, group: LayerGroup, pages: list[PageId], stop: int) -> list[PageId]:
        """Return a group's pages; for those that have left its window stands one that has not."""
        seen = 0 if group.window is None else max(0, self.computed - group.window + 1) // group.page_size
        return [pages[seen]] * seen + pages[seen : -(-stop // group.page_size)]


def greedy_texts(
    runner: EngineRunner, prompts: Seq[Seq[int]], num_tokens: int, chunk_tokens: int = 10**6
) -> list[list[int]]:
    """Continue all prompts together, each prompt in chunks of `chunk_tokens`."""
    return [text.answer for text in continued(runner, prompts, num_tokens, chunk_tokens)]


def continued(
    runner: EngineRunner,
    prompts: Seq[Seq[int]],
    num_tokens: int,
    chunk_tokens: int = 10**6,
    params: SamplingParams = GREEDY,
) -> list[Text]:
    """Do as `greedy_texts`; with the parameters `BEST_TWO`, also note by how much tokens lead."""
    num_pages, groups = len(runner.kv), runner.groups
    supply = ((7 * i + 3) % num_pages for i in count())  # num_pages must not be a multiple of 7
    texts = []
    for prompt in prompts:
        counts = [-(-(len(prompt) + num_tokens) // group.page_size) for group in groups]
        texts.append(Text(list(prompt), [[PageId(next(supply)) for _ in range(needed)] for needed in counts], params))
    assert sum(len(pages) for text in texts for pages in text.pages) <= num_pages
    while running := [text for text in texts if len(text.answer) < num_tokens]:
        chunks = tuple(text.chunk(groups, chunk_tokens) for text in running)
        result = runner.run(StepPlan(chunks))
        for text, chunk, drawn in zip(running, chunks, result.tokens, strict=True):
            text.computed = chunk.start + len(chunk.token_ids)
            text.take([token for gained in drawn for token in gained])
    return texts
