"""What goes between workers and routers under virtual time: messages at once, pages as fast as links carry them."""

from collections.abc import Iterable, Mapping

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import Peer
from pdserve.base.values import value
from pdserve.capacity.answers import OTHER
from pdserve.capacity.worker import Reported, SimWorker
from pdserve.engine.kvcache import KvCache
from pdserve.engine.sequence import Job, Sequence
from pdserve.kvtransfer import doors
from pdserve.measure.outcomes import OK, Outcome
from pdserve.perfmodel.profile import LinkFields
from pdserve.protocol.prefix_hash import short_hashes
from pdserve.protocol.refusal import Refused
from pdserve.protocol.reports import ReportedLoad, Stage
from pdserve.router.requests.commands import Finished, SequenceSpec
from pdserve.router.requests.events import KvChanged, LinkId, LoadReported, StageReached, VerifiedDraft
from pdserve.worker import messages
from pdserve.worker.messages import Event

# Stages that no decision depends on: they show a client where the time went.
LEDGER_ONLY = Stage.PREFILL_QUEUED, Stage.PREFILL_STARTED, Stage.GRANTED, Stage.DECODE_JOINED


@value
class Delta:
    """Tokens, as the router expects them off the wire."""

    request_id: bytes
    attempt: int
    index: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: int = 0
    logprobs: tuple[object, ...] = ()
    pooled: bytes = b""  # nobody asks for one here
    drafts: tuple[VerifiedDraft, ...] = ()


def report_tokens(reported: Reported, tokens: messages.Tokens) -> Delta:
    """Return the tokens that a sequence has gained since its last report, and count them as reported."""
    key = tokens.key.request_id, tokens.key.attempt
    known = reported[key]
    count = tokens.position + 1 - known
    if tokens.finish is None:
        reported[key] = tokens.position + 1
    else:
        del reported[key]
    reason = 0 if tokens.finish is None else 1
    return Delta(key[0], key[1], tokens.index, known, (OTHER,) * count, reason)


def unreported(reported: Reported, running: Iterable[Sequence]) -> list[Delta]:
    """Return what running sequences have gained since their last reports, and count it as reported."""
    deltas = []
    for sequence in running:
        job, key = sequence.job, (sequence.job.request_id, sequence.job.attempt)
        known = reported.get(key)
        count = 0 if known is None else len(sequence.tokens) - job.num_prompt_tokens - known
        if known is not None and count > 0 and len(sequence.indices) == 1:
            reported[key] = known + count
            deltas.append(Delta(*key, sequence.indices[0], known, (OTHER,) * count))
    return deltas


def job_of(spec: SequenceSpec) -> Job:
    """Return a router's work as a worker's."""
    return Job(
        spec.request_id,
        spec.attempt,
        tuple(spec.token_ids),
        spec.num_prompt_tokens,
        spec.params,
        spec.indices,
        spec.scope,
        spec.priority,
    )


def load_report(link: LinkId, load: messages.Load, router: messages.RouterRef) -> LoadReported:
    pages_lost = load.pages_quarantined + load.pages_leaked
    others = load.parts.others(router)
    report = ReportedLoad(load.pages_free, load.pages_wanted, pages_lost, load.draining, others=others)
    return LoadReported(link, report)


def kv_changed(link: LinkId, cache: KvCache) -> KvChanged | None:
    """Return what has changed in a prefix cache since the last time, as `worker.kv_feed` reports it; None: nothing."""
    touched = dict.fromkeys(page for change in cache.take_changes() for page in change.hashes if not change.group)
    if not touched:
        return None
    held = cache.spans
    stored = short_hashes(b"".join([page for page in touched if page in held]))
    return KvChanged(link, stored, short_hashes(b"".join([page for page in touched if page not in held])))


def stage_reached(link: LinkId, progress: messages.Progress, now_s: float) -> StageReached:
    return StageReached(
        link,
        progress.key.request_id,
        progress.key.attempt,
        progress.stage,
        now_s - progress.at_s,
        progress.cached_tokens,
        progress.handoff_bytes,
        progress.handoff_s,
        progress.pages_reused,
    )


def note_end(outcome: Outcome, end: Finished | Refused, now_s: float) -> None:
    """Note a request's end."""
    outcome.ended_s = now_s
    if isinstance(end, Refused):
        outcome.status, outcome.predicted_ttft_s = end.status.value, end.predicted_ttft_s
        return
    outcome.status = OK
    ttft_ms, tpot_ms = end.ledger.predicted_ttft_ms, end.ledger.predicted_tpot_ms
    outcome.predicted_ttft_s = None if ttft_ms is None else ttft_ms / 1e3
    outcome.predicted_tpot_s = None if tpot_ms is None else tpot_ms / 1e3


class Wires:
    """The links between all workers. Each worker sends one copy at a time, and receives one."""

    def __init__(
        self, clock: VirtualClock, link: LinkFields, page_bytes: int, workers: Mapping[LinkId, SimWorker]
    ) -> None:
        """`workers`: those of the cluster at any moment. A worker's incarnation is the number of its link."""
        self._clock = clock
        self._link = link
        self._page_bytes = page_bytes
        self._workers = workers
        self._connected: set[tuple[Peer, Peer]] = set()

    def offer(self, link: LinkId, event: Event) -> None:
        """Send a worker something, unless it has left: its end is reported by its routers."""
        if link in self._workers:
            self._workers[link].offer(event)

    def carry(self, worker: SimWorker, command: object) -> None:
        """Carry out what a worker's doors ask for."""
        match command:
            case doors.Connect(peer):
                if (worker.peer, peer) not in self._connected:
                    self._connected.add((worker.peer, peer))
                    self.offer(LinkId(peer.incarnation), doors.SenderAttached(worker.peer))
            case doors.StartCopy():
                self._copy(worker, command)
            case doors.ToReceiver(peer, key, message):
                self.offer(LinkId(peer.incarnation), doors.SenderMessage(worker.peer, key, message))
            case doors.ToSender(peer, key, message):
                self.offer(LinkId(peer.incarnation), doors.ReceiverMessage(worker.peer, key, message))
            case doors.Forget(peer):
                self._connected -= {(worker.peer, peer), (peer, worker.peer)}
            case _:
                pass

    def _copy(self, worker: SimWorker, copy: doors.StartCopy) -> None:
        target, link = self._workers.get(LinkId(copy.peer.incarnation)), self._link
        if target is None:
            return
        start_s = max(self._clock.now_s(), worker.sends_until_s, target.receives_until_s)
        end_s = start_s + len(copy.src) * self._page_bytes / link.bytes_per_s
        worker.sends_until_s = target.receives_until_s = end_s
        stopped = doors.ReceiverMessage(copy.peer, copy.key, doors.CopyStopped((0,) * len(copy.src)))
        self._clock.at(end_s + link.latency_s, worker.offer, stopped)
