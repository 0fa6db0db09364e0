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
        cached = self._prefixes.match(demand.names, demand.now_s)

        def to_wait_for(worker: WorkerView) -> tuple[int, int, str]:
            fresh = demand.num_tokens - cached.get(worker.link, 0)
            return worker.pending_prefill_tokens + fresh, worker.num_placed, worker.name

        def fullness(worker: WorkerView) -> tuple[float, int, str]:
            return worker.num_sequences / worker.registration.max_num_seqs, worker.num_placed, worker.name

        def computes(group: Group) -> tuple[int, int, str]:
            return min(map(to_wait_for, group.prefills or group.decodes))

        group = min(groups, key=computes)
        if not group.prefills:
            alone = min(group.decodes, key=lambda worker: (to_wait_for(worker)[0], fullness(worker)))
            return Placed(Pair(None, alone), f"prefix affinity: {_held(cached, alone)}", _num(cached, alone, demand))
        prefill = min(group.prefills, key=to_wait_for)
        decode = min(group.decodes, key=fullness, default=None)
        reason = f"prefix affinity: {_held(cached, prefill)}"
        return Placed(Pair(prefill, decode), reason, _num(cached, prefill, demand))


def _num(cached: dict[LinkId, int], worker: WorkerView, demand: Demand) -> int:
    return min(cached.get(worker.link, 0), demand.num_tokens - 1)


def _held(cached: dict[LinkId, int], worker: WorkerView) -> str:
    return f"{worker.name} holds about {cached.get(worker.link, 0)} tokens"
