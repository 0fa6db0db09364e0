"""One engine that answers requests one at a time: what any cluster of workers has to agree with."""

from collections.abc import Sequence

from pdserve.engine.kvcache import KvCache
from pdserve.engine.runner import Runner, run
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job, Sampled
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.ids import Attempt, RequestId
from pdserve.model.llama import Model
from pdserve.sampling import MAX_SEQUENCES, SamplingParams

_PAGE_SIZE = 16
_CHUNK = 256  # tokens


class LoneEngine:
    """A model with pages for one request at a time, and no prefix cache."""

    def __init__(self, model: Model, eos_token_ids: Sequence[int], max_num_tokens: int) -> None:
        """`max_num_tokens`: of a prompt and its answer, at most."""
        num_pages = MAX_SEQUENCES * (-(-max_num_tokens // _PAGE_SIZE) + 1)
        limits = Limits(MAX_SEQUENCES, _CHUNK, max_num_tokens, frozenset(eos_token_ids))
        self._scheduler = Scheduler(KvCache(num_pages, _PAGE_SIZE, None), limits)
        self._runner = Runner(model, num_pages, _PAGE_SIZE, eos_token_ids)

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> dict[int, tuple[int, ...]]:
        """Return the tokens of each continuation."""
        indices = tuple(range(params.n))
        job = Job(RequestId(bytes(16)), Attempt(0), tuple(prompt), len(prompt), params, indices)
        self._scheduler.add(EngineSequence(job, indices, list(prompt), order=0))
        tokens: dict[int, list[int]] = {index: [] for index in indices}
        while (plan := self._scheduler.plan()) is not None:
            for outcome in self._scheduler.commit(plan, run(self._runner, plan)):
                if isinstance(outcome, Sampled):
                    tokens[outcome.index].append(outcome.token.token_id)
        return {index: tuple(ids) for index, ids in tokens.items()}
