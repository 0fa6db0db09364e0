"""Messages of link.proto as a worker's core knows them, and back.

What a router sends is checked here: ProtocolError names the field. Only durations are on the wire; they become
readings of this process's clock on arrival.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from pdserve.base.errors import PeerFault, ProtocolError
from pdserve.base.ids import Attempt, Peer
from pdserve.engine.sequence import Finish, Job
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.speed import PairSpeed
from pdserve.observe.trace_context import read_trace
from pdserve.perfmodel.wire import write_cost
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.adapters import DIGEST_BYTES, AdapterDigest
from pdserve.protocol.inference import logprobs_to_proto, params_from_proto
from pdserve.protocol.link import (
    FAILURE_NUMBERS,
    ROLE_NUMBERS,
    ROLES,
    SOURCE_NUMBERS,
    STAGE_NUMBERS,
    key_from_proto,
    peer_from_proto,
)
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.protocol.reports import Stage
from pdserve.protocol.token_ids import TOKEN_ID_BYTES, from_wire
from pdserve.worker import messages
from pdserve.worker.messages import RouterRef

MAX_TOKEN_IDS = 1 << 22  # whose pages are asked for: above the context of any model

_FINISH = {Finish.STOP: inference.FINISH_REASON_STOP, Finish.LENGTH: inference.FINISH_REASON_LENGTH}


def event(message: link.AttachResponse, router: RouterRef, now_s: float) -> messages.RouterEvent | PeerGone | None:
    """Return what a router asks of the core; None for what concerns the shell alone."""
    match message.WhichOneof("message"):
        case "place":
            return _placed(message.place, router, now_s)
        case "move":
            return _move(message.move, router)
        case "share":
            return _share(message.share, now_s)
        case "set_role":
            return _role_given(message.set_role)
        case "cancel":
            cancel = message.cancel
            return messages.Cancelled(*key_from_proto(cancel), tuple(cancel.indices))
        case "drain":
            return messages.DrainCancelled() if message.drain.cancel else messages.DrainAsked()
        case "process_gone":
            return PeerGone(peer_from_proto(message.process_gone, "process_gone"))
        case _:
            return None


def step_report(
    costs: Iterable[messages.StepCost],
    tokens: Iterable[Seq[messages.Tokens]],
    stages: Iterable[messages.Progress],
    prompts: Iterable[messages.PromptScored],
    now_s: float,
) -> link.AttachRequest:
    """Return one message for steps and all that they brought to one router. `tokens`: of each sequence, in order.

    Its parts are written where they belong: protobuf copies a message that is given to another one.
    """
    message = link.AttachRequest()
    report = message.step
    for each in costs:
        cost = report.costs.add()
        write_cost(each.step, each.elapsed_s, cost)
        if now_s > each.at_s:
            cost.age_us = round((now_s - each.at_s) * 1e6)
    deltas = report.deltas
    for gained in tokens:
        _write_delta(gained, deltas.add())
    for stage in stages:
        _write_progress(stage, now_s, report.progress.add())
    for scored in prompts:
        _write_prompt(scored, report.prompts.add())
    return message


def failed(report: messages.Failed) -> link.AttachRequest:
    """Return the message that reports to a router that a request has ended here without its answer."""
    key = report.key
    ended = link.Failed(
        request_id=key.request_id, attempt=key.attempt, code=FAILURE_NUMBERS[report.code], detail=report.reason
    )
    return link.AttachRequest(failed=ended)


def heartbeat(
    load: messages.Load, num_steps: int, refused: Mapping[PeerFault, int], router: RouterRef
) -> link.AttachRequest:
    """Return the message that reports to a router how full this worker is, and what it has refused."""
    fields = {name: getattr(load, name) for name in messages.Load.__slots__ if name not in ("parts", "role")}
    counts = {refusal.value: count for refusal, count in refused.items()}
    others = link.OthersLoad(**load.parts.others(router)._asdict())
    role = ROLE_NUMBERS[load.role]
    beat = link.Heartbeat(num_steps=num_steps, refused=counts, others=others, role=role, **fields)
    return link.AttachRequest(heartbeat=beat)


def pair_measured(worker_id: str, speed: PairSpeed) -> link.AttachRequest:
    """Return the message that reports to routers how fast pages reach a worker."""
    pair = link.PairMeasured(
        decode_worker_id=worker_id,
        bytes_per_s=round(speed.bytes_per_s),
        page_us=max(1, round(1e6 * speed.page_s)),
        carrier=speed.carrier,
        is_slow=speed.is_slow,
    )
    return link.AttachRequest(pair=pair)


def _write_prompt(reported: messages.PromptScored, prompt: link.PromptDelta) -> None:
    key, logprobs = reported.key, reported.logprobs
    prompt.request_id, prompt.attempt, prompt.position = key.request_id, key.attempt, reported.position
    prompt.chosen, prompt.top_ids, prompt.top = logprobs.chosen, logprobs.top_ids, logprobs.top


def _placed(place: link.Place, router: RouterRef, now_s: float) -> messages.Placed:
    spec = place.spec
    params = params_from_proto(spec.sampling)
    key = key_from_proto(spec)
    job = Job(
        request_id=key.request_id,
        attempt=key.attempt,
        token_ids=from_wire(spec.token_ids, "spec.token_ids"),
        num_prompt_tokens=spec.num_prompt_tokens,
        params=params,
        indices=tuple(spec.indices[:]) or tuple(range(params.n)),
        scope=_scope(spec.cache_salt, spec.adapter, "spec.adapter"),
        priority=spec.priority,
    )
    source = peer_from_proto(place.source, "source") if place.HasField("source") else None
    if place.HasField("fetch") and source is not None:
        raise ProtocolError("fetch: the prompt comes from a source")
    if params.pooling is not None and (source is not None or place.HasField("target")):
        raise ProtocolError("sampling.pooling: nothing of it is handed over")
    if place.extra_tokens and source is None:
        raise ProtocolError(f"extra_tokens: {place.extra_tokens}, and no source")
    target, address = _target(place.target) if place.HasField("target") else (None, "")
    fetch = _fetch(place.fetch, now_s) if place.HasField("fetch") else None
    trace = read_trace(spec.traceparent, spec.tracestate) if spec.traceparent else None
    return messages.Placed(
        router, job, now_s + spec.deadline_ms / 1000, source, target, address, place.extra_tokens, fetch, trace
    )


def _fetch(fetch: link.Fetch, now_s: float) -> messages.Fetch:
    if not fetch.num_tokens:
        raise ProtocolError("fetch.num_tokens: 0")
    holder = peer_from_proto(fetch.holder, "fetch.holder")
    return messages.Fetch(holder, fetch.num_tokens, now_s + fetch.within_ms / 1000)


def _move(move: link.Move, router: RouterRef) -> messages.MoveAsked:
    target, address = _target(move.target)
    if move.new_attempt <= move.attempt:
        raise ProtocolError(f"new_attempt: {move.new_attempt} is not above attempt {move.attempt}")
    if not move.num_tokens:
        raise ProtocolError("move.num_tokens: 0")
    key, new_attempt = key_from_proto(move), Attempt(move.new_attempt)
    return messages.MoveAsked(router, key, move.index, new_attempt, target, address, move.num_tokens)


def _share(share: link.Share, now_s: float) -> messages.ShareAsked:
    target, address = _target(share.target)
    if len(share.token_ids) > MAX_TOKEN_IDS * TOKEN_ID_BYTES:
        raise ProtocolError(f"share.token_ids: {len(share.token_ids)} bytes, the limit is {MAX_TOKEN_IDS} tokens")
    token_ids = from_wire(share.token_ids, "share.token_ids")
    key, deadline_s = key_from_proto(share), now_s + share.within_ms / 1000
    scope = _scope(share.cache_salt, share.adapter, "share.adapter")
    return messages.ShareAsked(key, token_ids, scope, target, address, deadline_s)


def _scope(salt: str, adapter: AdapterDigest, field: str) -> CacheScope:
    if len(adapter) not in (0, DIGEST_BYTES):
        raise ProtocolError(f"{field}: {len(adapter)} bytes, a digest has {DIGEST_BYTES}")
    return CacheScope(salt, adapter)


def _role_given(given: link.SetRole) -> messages.RoleGiven:
    role = ROLES.get(given.role)
    if role is None:
        raise ProtocolError(f"set_role.role: {given.role} is unknown")
    if not given.epoch:
        raise ProtocolError("set_role.epoch: 0 is that of a worker's start")
    return messages.RoleGiven(role, given.epoch)


def _target(worker: link.WorkerRef) -> tuple[Peer, str]:
    if not worker.handoff_address:
        raise ProtocolError("target.handoff_address: empty")
    return peer_from_proto(worker, "target"), worker.handoff_address


def _write_progress(reported: messages.Progress, now_s: float, progress: link.Progress) -> None:
    progress.request_id, progress.attempt = reported.key.request_id, reported.key.attempt
    progress.stage = STAGE_NUMBERS[reported.stage]
    if now_s > reported.at_s:
        progress.age_us = round((now_s - reported.at_s) * 1e6)
    if reported.cached_tokens:
        progress.cached_tokens = reported.cached_tokens
    if reported.pages_reused:
        progress.pages_reused = reported.pages_reused
    if reported.stage is Stage.LANDED:
        progress.handoff_bytes, progress.handoff_us = reported.handoff_bytes, round(reported.handoff_s * 1e6)


def _write_delta(gained: Seq[messages.Tokens], delta: link.TokenDelta) -> None:
    """Write successive tokens of one sequence."""
    first, last = gained[0], gained[-1]
    delta.request_id, delta.attempt = first.key.request_id, first.key.attempt
    delta.index, delta.position = first.index, first.position
    for each in gained:
        for token in each.tokens:
            delta.token_ids.append(token.token_id)
            if token.logprobs is not None:
                delta.logprobs.append(logprobs_to_proto(token.logprobs))
        if (verified := each.verified) is not None:
            delta.drafts.add(
                source=SOURCE_NUMBERS[verified.source],
                num_draft_tokens=verified.num_draft_tokens,
                num_accepted_tokens=verified.num_accepted_tokens,
            )
    if last.finish is not None:
        delta.finish_reason = _FINISH[last.finish]
        delta.pooled = last.pooled
