"""What the live page shows, as JSON: sections of entries by name, and the difference between two states. Pure.

Invariant: a page that applies each difference has the state that it was made of; and of requests a state holds only
those that its tenant may see.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from google.protobuf.json_format import MessageToDict

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.wire import ROLES

MAX_KEPT = 256  # requests that have ended, and happenings
MAX_SECONDS = 300
MAX_OF_STAGE = 16  # requests under way, of each stage
State: TypeAlias = dict[str, dict[str, object]]


def difference(before: Mapping[str, Mapping[str, object]], after: Mapping[str, Mapping[str, object]]) -> State:
    """Return the entries of each section that are other than before; None stands for one that is gone."""
    changes: State = {}
    for section, entries in after.items():
        known = before.get(section, {})
        changed = {name: entry for name, entry in entries.items() if known.get(name) != entry}
        gone = dict.fromkeys(name for name in known if name not in entries)
        if changed or gone:
            changes[section] = {**changed, **gone}
    return changes


class Board:
    """Collects what a router shows; makes of it what a page is sent."""

    def __init__(self) -> None:
        self.number = 0  # of the newest entry taken
        self._last = admin.GetLiveResponse()
        self._ended: deque[tuple[admin.EndedRequest, dict[str, object]]] = deque(maxlen=MAX_KEPT)
        self._happenings: dict[str, object] = {}  # by key, oldest first
        self._seconds: dict[str, object] = {}

    def take(self, news: admin.GetLiveResponse) -> None:
        """Take what came since `number`."""
        self._last, self.number = news, news.number
        self._ended.extend((ended, _ended(ended)) for ended in news.ended)
        for happening in news.happenings:
            key = str(happening.key)
            self._happenings.pop(key, None)
            self._happenings[key] = _plain(happening, "unix_time_ms", "kind", "subject", "text", "count")
        for second in news.seconds:
            counts = second.num_ended, second.num_missed, second.num_judged, second.num_met, second.num_answer_tokens
            self._seconds[str(second.at_s)] = [second.unix_time_ms, *counts]
        for entries, limit in ((self._happenings, MAX_KEPT), (self._seconds, MAX_SECONDS)):
            while len(entries) > limit:
                del entries[next(iter(entries))]

    def state(self, tenant: str | None) -> State:
        """Return all that is shown; of requests those of a tenant alone, or all of them with None."""
        may_see, last = _filter(tenant), self._last
        return {
            "facts": _facts(last),
            "workers": {worker.registration.worker_id: _worker(worker) for worker in last.status.workers},
            "requests": {each.request_id: _running(each) for each in _newest(last.requests, may_see)},
            "ended": {str(each.number): shown for each, shown in self._ended if may_see(each.tenant)},
            "happenings": dict(self._happenings),
            "seconds": dict(self._seconds),
            "refused": dict(last.status.refused_because),
        }

    @property
    def clock(self) -> dict[str, object]:
        """The router's time, and for how long it has run."""
        return _plain(self._last, "unix_time_ms", "uptime_ms")

    def request(
        self, request_id: str, tenant: str | None, running: Iterable[admin.LiveRequest]
    ) -> dict[str, object] | None:
        """Return all that is known of one request, as admin.proto has it; None where it is not known.

        `running` are the requests of that id that have not ended.
        """
        may_see = _filter(tenant)
        known: list[admin.LiveRequest | admin.EndedRequest] = [*running, *(message for message, _ in self._ended)]
        for found in known:
            if found.request_id == request_id and may_see(found.tenant):
                return MessageToDict(found, preserving_proto_field_name=True)
        return None


def _filter(tenant: str | None) -> Callable[[str], bool]:
    return lambda owner: tenant is None or owner == tenant


def _newest(requests: Iterable[admin.LiveRequest], may_see: Callable[[str], bool]) -> Iterator[admin.LiveRequest]:
    """Yield the newest requests of each stage, oldest first."""
    seen = [each for each in requests if may_see(each.tenant)]
    num_left = Counter(each.stage for each in seen)
    for each in seen:
        if num_left[each.stage] <= MAX_OF_STAGE:
            yield each
        num_left[each.stage] -= 1


def _plain(message: object, *names: str) -> dict[str, object]:
    return {name: getattr(message, name) for name in names}


def _facts(live: admin.GetLiveResponse) -> dict[str, object]:
    return {"model": live.status.model, "router": live.status.router_id, "stages": dict(live.stages)}


def _worker(worker: admin.WorkerStatus) -> dict[str, object]:
    told, load = worker.registration, worker.load
    taken = load.pages_held + load.pages_granted + load.pages_quarantined + load.pages_leaked
    return {
        "role": str(ROLES.get(told.role, "?")),
        "epoch": told.role_epoch,
        "state": _state(worker),
        "why": load.drain_reason if load.draining else worker.unroutable,
        "loaded": round(told.load_progress, 2),
        "process": f"{told.incarnation:016x}",
        "num_pages": told.num_pages,
        "page_size": told.layout.page_size,
        "pages": {
            "held": load.pages_held,
            "granted": load.pages_granted,
            "cached": load.pages_cached,
            "quarantined": load.pages_quarantined + load.pages_leaked,
            "free": max(0, told.num_pages - taken - load.pages_cached),
        },
        "running": load.num_running,
        "waiting": load.num_waiting,
        "max_running": told.max_num_seqs,
        "handoffs": load.num_handoffs,
        "step_ms": round(worker.step_ms, 1),
        "silent_s": worker.silent_ms // 1000,
    }


def _state(worker: admin.WorkerStatus) -> str:
    if not worker.registration.ready:
        return "loading"
    if worker.load.draining:
        return "draining"
    return "unusable" if worker.unroutable else "ready"


def _running(request: admin.LiveRequest) -> dict[str, object]:
    return {
        **_plain(request, "stage", "prompt_tokens", "answer_tokens", "waits_for", "decode_worker"),
        "prefill_worker": request.ledger.prefill_worker,
        "received_ms": round(request.unix_time_ms, -2),  # the clocks that it is made of jitter
        "passed": [step.name for step in request.ledger.steps],
        "moves": len(request.ledger.moves),
    }


def _ended(ended: admin.EndedRequest) -> dict[str, object]:
    ledger = ended.ledger
    return {
        **_plain(ended, "request_id", "unix_time_ms", "status", "because", "message"),
        **_plain(ended.usage, "prompt_tokens", "completion_tokens"),
        **_plain(ledger, "prefill_worker", "decode_worker", "attempts"),
        "ttft_ms": round(ledger.ttft_ms, 2),
        "tpot_ms": round(ledger.tpot_ms, 2),
        "predicted_ttft_ms": round(ledger.predicted_ttft_ms, 2) if ledger.HasField("predicted_ttft_ms") else None,
        "predicted_tpot_ms": round(ledger.predicted_tpot_ms, 2) if ledger.HasField("predicted_tpot_ms") else None,
        "met": ended.met if ended.HasField("met") else None,
        "moves": len(ledger.moves),
        "passed": [step.name for step in ledger.steps],
    }
