"""Places a request where most of its prefix is, unless more waits there than that saves."""

from collections.abc import Sequence as Seq

from pdserve.router.events import LinkId
from pdserve.router.forecast import Forecast
from pdserve.router.placement import Decision, Demand, Group, Pair, Placed
from pdserve.router.view import WorkerView


class PrefixAffinity:
    """The policy. `forecast` is the router's; its prefix table is all this policy asks."""

    def __init__(self, forecast: Forecast) -> None:
        self._prefixes = forecast.prefixes

    def __call__(self, groups: Seq[Group], demand: Demand) -> Decision:
        cached = self._prefixes.match(demand.hashes, demand.now_s)

        def to_wait_for(worker: WorkerView) -> tuple[int, int, str]:
            fresh = demand.num_tokens - cached.get(worker.link, 0)
            return worker.pending_prefill_tokens + fresh, worker.num_placed, worker.name

        def fullness(worker: WorkerView) -> tuple[float, int, str]:
            return worker.num_sequences / worker.registration.max_num_seqs, worker.num_placed, worker.name

        def computes(group: Group) -> tuple[int, int, str]:
            return min(map(to_wait_for, group.prefills or group.decodes))

        group = min(groups, key=computes)
        if group.prefills:
            prefill = min(group.prefills, key=to_wait_for)
            return _placed(Pair(prefill, min(group.decodes, key=fullness, default=None)), prefill, cached, demand)
        alone = min(group.decodes, key=lambda worker: (to_wait_for(worker)[0], fullness(worker)))
        return _placed(Pair(None, alone), alone, cached, demand)


def _placed(pair: Pair, worker: WorkerView, cached: dict[LinkId, int], demand: Demand) -> Placed:
    """Return a placement whose prompt this worker computes. The score is the share of the prompt that it holds."""
    num_held = min(cached.get(worker.link, 0), demand.num_tokens - 1)
    reason = f"prefix affinity: {worker.name} holds about {num_held} of {demand.num_tokens} tokens"
    return Placed(pair, reason, num_held, score=num_held / demand.num_tokens)
