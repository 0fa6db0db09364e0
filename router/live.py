"""What the live page shows of a router: sections of entries by name, as JSON has them.

Of a request it has lengths, times and names, and nothing of what it says. Entries of requests have their tenant, so
that a door can leave out those of others.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from pdserve.base.ids import RequestId
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.protocol.link import ROLES
from pdserve.protocol.refusal import Refused
from pdserve.protocol.reports import Stage
from pdserve.router.frontend.backend import MAX_OF_STAGE, State
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.recent import Ended, judge
from pdserve.router.requests.request import Request
from pdserve.router.requests.timeline import Ledger, Timeline

MAX_REQUESTS = 256  # of all
# With as many, and all that is kept of the past, a state is 0.2 MB, or 0.4 MB with happenings of 1,000 characters. It
# takes 2 to 3 ms to make, 7 µs of that for each request, and 0.4 ms to encode.
WORKER_STATES = ("loading", "ready", "draining", "unusable")
QUEUE, PREFILL, HANDOFF, DECODE = "queue", "prefill", "handoff", "decode"
_JITTER_S = 0.1  # between readings of two clocks: by less, no time that was shown changes
Shown = dict[str, Any]


def stage_of(request: Request) -> str:
    """Return where a request is on its way. One that moves to another decode worker is in a hand-off again."""
    sequence = next((sequence for sequence in request.sequences if not sequence.ended), request.sequences[0])
    placement = sequence.placement
    if placement is None:
        return QUEUE
    if sequence.shadow is not None:
        return HANDOFF
    if placement.committed or (placement.is_local and sequence.has_come):
        return DECODE
    if placement.attempt or Stage.FIRST_TOKEN not in request.timeline:
        return PREFILL if Stage.PREFILL_STARTED in request.timeline else QUEUE
    return DECODE if placement.decode is None else HANDOFF


class Live:
    def __init__(self, core: RouterCore, status: Callable[[], admin.ClusterStatus], started_s: float) -> None:
        self._core = core
        self._status = status
        self._started_s = started_s
        self._to_unix_s = -inf
        self._ended: dict[int, Shown] = {}  # by number: what has ended does not change

    def state(self, now_s: float, unix_s: float) -> State:
        """Return all that is shown to somebody who may see everything."""
        self._take_clocks(now_s, unix_s)
        status, recent = self._status(), self._core.placements.recent
        staged = [(request, stage_of(request)) for request in self._core.requests()]
        self._ended = {each.number: self._ended.get(each.number) or self._of_ended(each) for each in recent.ended}
        return {
            "clock": {"unix_time_ms": round(unix_s * 1e3), "uptime_ms": round((now_s - self._started_s) * 1e3)},
            "facts": {
                "model": status.model,
                "router": status.router_id,
                "stages": dict(Counter(stage for _, stage in staged)),
            },
            "workers": {worker.registration.worker_id: _worker(worker) for worker in status.workers},
            "requests": {each.request_id.hex(): self._running(each, stage) for each, stage in _newest(staged)},
            "ended": {str(number): shown for number, shown in self._ended.items()},
            "happenings": {
                str(each.key): {
                    "unix_time_ms": self._unix_ms(each.at_s),
                    "kind": each.kind.value,
                    "subject": each.subject,
                    "text": each.text,
                    "count": each.count,
                }
                for each in recent.happenings
            },
            "seconds": {
                str(each.at): [
                    self._unix_ms(each.at),
                    *(each.num_ended, each.num_missed, each.num_judged, each.num_met, each.num_answer_tokens),
                ]
                for each in recent.seconds
            },
            "drafts": {source: asdict(counted) for source, counted in recent.drafts.items()},
            "refused": {cause.value: count for cause, count in self._core.placements.refused_because.items()},
        }

    def request(self, name: str, now_s: float, unix_s: float) -> Shown | None:
        """Return all that is known of one request, by its id in hexadecimal; None where it is not known."""
        self._take_clocks(now_s, unix_s)
        try:
            request_id = RequestId(bytes.fromhex(name))
        except ValueError:
            return None
        request = self._core.find(request_id)
        if request is not None:
            ledger = _ledger(request.ledger, request.timeline)
            return {"request_id": name, **self._running(request, stage_of(request)), "ledger": ledger}
        for ended in self._core.placements.recent.ended:
            if ended.request_id == request_id:
                slo_ms = [None if slo_s is None else slo_s * 1e3 for slo_s in ended.slo_s]
                return {
                    **self._of_ended(ended),
                    "usage": asdict(ended.usage),
                    "slo": dict(zip(("ttft_ms", "tpot_ms"), slo_ms, strict=True)),
                    "ledger": _ledger(ended.ledger, ended.timeline),
                }
        return None

    def _take_clocks(self, now_s: float, unix_s: float) -> None:
        if abs(unix_s - now_s - self._to_unix_s) > _JITTER_S:
            self._to_unix_s = unix_s - now_s

    def _unix_ms(self, at_s: float) -> int:
        return round((at_s + self._to_unix_s) * 1e3)

    def _running(self, request: Request, stage: str) -> Shown:
        placements = tuple(request.placements.values())
        decode = placements[-1].decode if placements else None
        return {
            "tenant": request.tenant,
            "stage": stage,
            "prompt_tokens": request.num_tokens,
            "answer_tokens": request.num_delivered,
            "waits_for": request.waits_for.message if request.waits_for else "",
            "prefill_worker": request.ledger.prefill_worker,
            "decode_worker": "" if decode is None else decode.name,
            "received_ms": self._unix_ms(request.received_s),
            "passed": _passed(request.timeline),
            "moves": len(request.ledger.moves),
        }

    def _of_ended(self, ended: Ended) -> Shown:
        refused = ended.outcome if isinstance(ended.outcome, Refused) else None
        ledger, verdict = ended.ledger, judge(ended.slo_s, ended.outcome)
        return {
            "tenant": ended.tenant,
            "request_id": ended.request_id.hex(),
            "unix_time_ms": self._unix_ms(ended.at_s),
            "status": "OK" if refused is None else refused.status.value,
            "because": "" if refused is None else refused.cause.value,
            "message": "" if refused is None else refused.message,
            "prompt_tokens": ended.usage.prompt_tokens,
            "completion_tokens": ended.usage.completion_tokens,
            "prefill_worker": ledger.prefill_worker,
            "decode_worker": ledger.decode_worker,
            "attempts": ledger.attempts,
            "ttft_ms": ledger.ttft_ms,
            "tpot_ms": ledger.tpot_ms,
            "predicted_ttft_ms": ledger.predicted_ttft_ms,
            "predicted_tpot_ms": ledger.predicted_tpot_ms,
            "met": None if verdict is None else verdict.ttft and verdict.tpot,
            "moves": len(ledger.moves),
            "passed": _passed(ended.timeline),
        }


def _newest(staged: Sequence[tuple[Request, str]]) -> list[tuple[Request, str]]:
    """Return the newest requests of each tenant and stage, oldest first. `staged` are all, in that order."""
    num_shown: Counter[tuple[str, str]] = Counter()
    newest: list[tuple[Request, str]] = []
    for request, stage in reversed(staged):
        if len(newest) == MAX_REQUESTS:
            break
        num_shown[request.tenant, stage] += 1
        if num_shown[request.tenant, stage] <= MAX_OF_STAGE:
            newest.append((request, stage))
    return newest[::-1]


def _passed(timeline: Timeline) -> list[str]:
    return [stage.value for stage, _ in timeline.steps()]


def _ledger(ledger: Ledger, timeline: Timeline) -> Shown:
    steps = [{"name": stage.value, "at_ms": at_ms} for stage, at_ms in timeline.steps()]
    return {**asdict(ledger), "steps": steps}


def _worker(worker: admin.WorkerStatus) -> Shown:
    known, load = worker.registration, worker.load
    taken = load.pages_held + load.pages_granted + load.pages_quarantined + load.pages_leaked
    return {
        "role": str(ROLES.get(known.role, "?")),
        "epoch": known.role_epoch,
        "state": state_of(known.ready, load.draining, worker.unroutable),
        "why": load.drain_reason if load.draining else worker.unroutable,
        "loaded": round(known.load_progress, 2),
        "process": f"{known.incarnation:016x}",
        "num_pages": known.num_pages,
        "page_size": known.layout.page_size,
        "pages": {
            "held": load.pages_held,
            "granted": load.pages_granted,
            "cached": load.pages_cached,
            "quarantined": load.pages_quarantined + load.pages_leaked,
            "free": max(0, known.num_pages - taken - load.pages_cached),
        },
        "running": load.num_running,
        "waiting": load.num_waiting,
        "max_running": known.max_num_seqs,
        "handoffs": load.num_handoffs,
        "step_ms": round(worker.step_ms, 1),
        "silent_s": worker.silent_ms // 1000,
    }


def state_of(is_ready: bool, is_draining: bool, unroutable: str) -> str:
    """Return the one of WORKER_STATES in which a worker is; `unroutable`: why nothing is placed on it."""
    if not is_ready:
        return "loading"
    if is_draining:
        return "draining"
    return "unusable" if unroutable else "ready"
