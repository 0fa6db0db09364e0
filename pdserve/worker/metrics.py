"""What a worker shows of itself as metrics: its steps, counted as they are reported, and its state as it is."""

from collections import Counter
from collections.abc import Iterator, Mapping

from pdserve import metrics
from pdserve.engine.kvcache import KvCache
from pdserve.errors import Refusal
from pdserve.kvtransfer import receiver, sender
from pdserve.metrics import Distribution, Sample
from pdserve.perfmodel.curve import Step
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Load

_ENDED = ("CLOSED", "COMMITTED", "FREE")  # no hand-off that is open is in these states


class Steps:
    def __init__(self) -> None:
        self._gaps, self._sizes = Distribution(metrics.ITL), Distribution(metrics.STEP_TOKENS)
        self._num_computed = self._num_sampled = 0

    def note(self, computed: Step, elapsed_s: float, num_tokens: int) -> None:
        """Count a step that brought so many tokens of answers."""
        if computed.sequences:
            self._gaps.observe(elapsed_s, computed.sequences)
        self._sizes.observe(computed.prefill_tokens + computed.sequences)
        self._num_computed += computed.prefill_tokens
        self._num_sampled += num_tokens

    def samples(self, model: str) -> Iterator[Sample]:
        label = (model,)
        yield Sample(metrics.ITL, self._gaps, label)
        yield Sample(metrics.STEP_TOKENS, self._sizes, label)
        yield Sample(metrics.COMPUTED_TOKENS, self._num_computed, label)
        yield Sample(metrics.SAMPLED_TOKENS, self._num_sampled, label)


def load_samples(load: Load, cache: KvCache, model: str) -> Iterator[Sample]:
    label, num_pages = (model,), cache.pool.num_pages
    yield Sample(metrics.WAITING, load.num_waiting, label)
    yield Sample(metrics.RUNNING, load.num_running, label)
    yield Sample(metrics.KV_USAGE, 1 - load.pages_free / num_pages, label)
    yield Sample(metrics.PREEMPTIONS, load.num_preemptions, label)
    yield Sample(metrics.CACHE_CONFIG, 1, (str(cache.page_size), str(num_pages)))
    yield Sample(metrics.ROLE, 1, (load.role.value,))
    yield Sample(metrics.DRAINING, load.draining)
    pages = {
        "empty": load.pages_free - load.pages_cached,
        "cached": load.pages_cached,
        "held": load.pages_held,
        "granted": load.pages_granted,
        "quarantined": load.pages_quarantined,
    }
    yield from (Sample(metrics.PAGES, count, (state,)) for state, count in pages.items())
    yield Sample(metrics.LEAKED, load.pages_leaked)
    yield Sample(metrics.WAITING_TOKENS, load.waiting_tokens)
    yield Sample(metrics.KV_TOKENS, load.kv_tokens)
    yield Sample(metrics.DIGEST_MISMATCHES, load.num_digest_mismatches)
    yield Sample(metrics.STALLED_PEERS, load.num_stalled_peers)


def handoff_samples(core: WorkerCore) -> Iterator[Sample]:
    """Yield how many hand-offs are open, in each state."""
    yield Sample(metrics.HANDOFFS, core.incoming.num_ungranted, ("in", "waiting"))
    sides = ("in", receiver.State, core.incoming.states), ("out", sender.State, core.outgoing.states)
    for direction, states, present in sides:
        counts = Counter(state.name for state in present)
        names = [state.name for state in states if state.name not in _ENDED]
        yield from (Sample(metrics.HANDOFFS, counts[name], (direction, name.lower())) for name in names)


def refusal_samples(refused: Mapping[Refusal, int]) -> Iterator[Sample]:
    return (Sample(metrics.REFUSED_MESSAGES, refused.get(each, 0), (each.value,)) for each in Refusal)
