"""What a router shows to whoever watches it: one message, whole at first, then what came since."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdserve.ids import RequestId
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.reports import Stage
from pdserve.router import wire
from pdserve.router.commands import Refused
from pdserve.router.core import RouterCore
from pdserve.router.recent import Ended, Recent, judge
from pdserve.router.request import Request

MAX_OF_STAGE = 16  # requests of a tenant that are shown one by one
MAX_REQUESTS = 256  # of all: one costs 40 µs, four times a second
QUEUE, PREFILL, HANDOFF, DECODE = "queue", "prefill", "handoff", "decode"


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


def live(
    core: RouterCore, status: admin.ClusterStatus, after: int, now_s: float, unix_s: float
) -> admin.GetLiveResponse:
    recent, to_unix_s = core.placements.recent, unix_s - now_s
    staged = [(request, stage_of(request)) for request in core.requests()]
    return admin.GetLiveResponse(
        status=status,
        unix_time_ms=round(unix_s * 1e3),
        number=recent.number,
        stages=Counter(stage for _, stage in staged),
        requests=[_running(request, stage, to_unix_s) for request, stage in _newest(staged)],
        ended=[_ended(ended, to_unix_s) for ended in recent.ended if ended.number > after],
        happenings=list(_happenings(recent, after, to_unix_s)),
        seconds=list(_seconds(recent, after, to_unix_s)),
    )


def running(core: RouterCore, request_id: RequestId, now_s: float, unix_s: float) -> admin.LiveRequest | None:
    request = core.find(request_id)
    return None if request is None else _running(request, stage_of(request), unix_s - now_s)


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


def _running(request: Request, stage: str, to_unix_s: float) -> admin.LiveRequest:
    placements = tuple(request.placements.values())
    decode = placements[-1].decode if placements else None
    return admin.LiveRequest(
        request_id=request.request_id.hex(),
        tenant=request.tenant,
        unix_time_ms=round((request.received_s + to_unix_s) * 1e3),
        stage=stage,
        prompt_tokens=request.num_tokens,
        answer_tokens=request.num_delivered,
        waits_for=str(request.waits_for or ""),
        decode_worker="" if decode is None else decode.name,
        ledger=wire.ledger_message(replace(request.ledger, steps=request.timeline.steps())),
    )


def _ended(ended: Ended, to_unix_s: float) -> admin.EndedRequest:
    refused = ended.outcome if isinstance(ended.outcome, Refused) else None
    (ttft_s, tpot_s), verdict = ended.slo_s, judge(ended.slo_s, ended.outcome)
    return admin.EndedRequest(
        number=ended.number,
        unix_time_ms=round((ended.at_s + to_unix_s) * 1e3),
        request_id=ended.request_id.hex(),
        tenant=ended.tenant,
        status="OK" if refused is None else refused.status.value,
        because="" if refused is None or refused.because is None else refused.because.cause.value,
        message="" if refused is None else refused.message,
        usage=wire.usage_message(ended.usage),
        slo=inference.Slo(
            ttft_ms=None if ttft_s is None else ttft_s * 1e3, tpot_ms=None if tpot_s is None else tpot_s * 1e3
        ),
        ledger=wire.ledger_message(replace(ended.ledger, steps=ended.timeline.steps())),
        met=None if verdict is None else verdict.ttft and verdict.tpot,
    )


def _happenings(recent: Recent, after: int, to_unix_s: float) -> Iterator[admin.Happening]:
    for happening in recent.happenings:
        if happening.number > after:
            yield admin.Happening(
                key=happening.key,
                number=happening.number,
                unix_time_ms=round((happening.at_s + to_unix_s) * 1e3),
                kind=happening.kind.value,
                subject=happening.subject,
                text=happening.text,
                count=happening.count,
            )


def _seconds(recent: Recent, after: int, to_unix_s: float) -> Iterator[admin.LiveSecond]:
    for second in recent.seconds:
        if second.number <= after:
            continue
        yield admin.LiveSecond(
            at_s=second.at,
            unix_time_ms=round((second.at + to_unix_s) * 1e3),
            num_ended=second.num_ended,
            num_missed=second.num_missed,
            num_judged=second.num_judged,
            num_met=second.num_met,
            num_answer_tokens=second.num_answer_tokens,
        )
