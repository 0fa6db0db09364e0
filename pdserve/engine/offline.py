"""One engine that answers requests one at a time: what any cluster of workers has to agree with."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.model.family import Model
from pdserve.model.layer_groups import layer_groups
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import MAX_SEQUENCES, SamplingParams

_PAGE_SIZE = 16
_CHUNK = 256  # tokens
TIED = 2e-5  # log probabilities in float32 that differ by less may change places
# The same where K and V are coded: another order of sums may change a code by one. Over 180 cuts of random prompts, the
# worst log probability was then 1.8e-3 off (int8, the tests' small Qwen3), and a pair may be off to both sides. Neither
# limit is enough for mixtures of experts: the tests' small Mixtral was up to 1e-4 off, and 2.8e-2 with codes.
TIED_CODED = 5e-3


class LoneEngine:
    """A model with pages for one request at a time, and no prefix cache."""

    def __init__(
        self, model: Model, eos_token_ids: Sequence[int], max_num_tokens: int, code: KvCode | None = None
    ) -> None:
        """`max_num_tokens`: of a prompt and its answer, at most. code: the form of K and V."""
        paging = paging_of(layer_groups(model.config, _PAGE_SIZE))
        num_pages = MAX_SEQUENCES * (paging.most_pages(max_num_tokens, _CHUNK) + len(paging.shapes))
        limits = Limits(MAX_SEQUENCES, _CHUNK, max_num_tokens, frozenset(eos_token_ids))
        self._tied = TIED if code is None else TIED_CODED
        self._scheduler = Scheduler(KvCache(num_pages, paging, None), limits)
        self._runner = Runner(model, num_pages, _PAGE_SIZE, eos_token_ids, code=code)

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> dict[int, tuple[int, ...]]:
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(range(params.n), ())
        for sampled in self._sample(prompt, params):
            tokens[sampled.index] += tuple([token.token_id for token in sampled.tokens])
        return tokens

    def is_tied(self, prompt: Sequence[int], params: SamplingParams) -> bool:
        """Whether some greedy token is hardly likelier than the next: another order of sums may choose the other."""
        if not params.is_greedy:
            return False
        sampled = self._sample(prompt, replace(params, logprobs=2))
        reported = [token.logprobs for each in sampled for token in each.tokens]
        return any(each is not None and each.top[0][1] - each.top[1][1] < self._tied for each in reported)

    def _sample(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Sampled]:
        indices = tuple(range(params.n))
        job = Job(RequestId(bytes(16)), Attempt(0), tuple(prompt), len(prompt), params, indices)
        self._scheduler.add(EngineSequence(job, indices, list(prompt), order=0))
        while (plan := self._scheduler.plan()) is not None:
            for outcome in self._scheduler.commit(plan, self._runner.run(plan)):
                if isinstance(outcome, Sampled):
                    yield outcome
