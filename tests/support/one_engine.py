"""One engine in this process: what a cluster of workers must agree with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from scheduled import sequence_of

from pdserve.checkpoint.checkpoint import choose_quantization, weights_in_form
from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Sampled
from pdserve.model.loading import load_model
from pdserve.protocol.paging import Paging
from pdserve.protocol.sampling import SampledToken, SamplingParams

NUM_PAGES = 256


class OneEngine:
    """A model, its pages and a scheduler, computing one request at a time."""

    def __init__(
        self, path: Path, dtype: torch.dtype, page_size: int, max_num_batched_tokens: int, quantization: str = "auto"
    ) -> None:
        checkpoint = open_checkpoint(path)
        form = choose_quantization(quantization, checkpoint, str(dtype).removeprefix("torch."), "cpu")
        model = load_model(checkpoint.config, weights_in_form(checkpoint, form), dtype)
        limits = Limits(8, max_num_batched_tokens, 4096, frozenset(checkpoint.eos_token_ids))
        self._scheduler = Scheduler(KvCache(NUM_PAGES, Paging.of(page_size), None), limits)
        self._runner = Runner(model, NUM_PAGES, page_size, checkpoint.eos_token_ids)
        self.vocab_size = checkpoint.config.vocab_size

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> dict[int, list[SampledToken]]:
        """Return the tokens of each continuation."""
        self._scheduler.add(sequence_of(0, prompt, params))
        tokens: dict[int, list[SampledToken]] = {index: [] for index in range(params.n)}
        while (plan := self._scheduler.plan()) is not None:
            for outcome in self._scheduler.commit(plan, self._runner.run(plan)):
                if isinstance(outcome, Sampled):
                    tokens[outcome.index].extend(outcome.tokens)
        return tokens
