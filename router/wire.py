"""Between protobuf messages and the core's events and commands.

What a worker sends is checked here as far as a single message shows it; ProtocolError names the field.
"""

from collections.abc import Sequence as Seq
from dataclasses import asdict

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, RequestId, WorkerId
from pdserve.perfmodel.wire import read_cost
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.adapters import DIGEST_BYTES, MAX_ADAPTERS, MAX_NAME_BYTES, Adapter
from pdserve.protocol.inference import params_to_proto
from pdserve.protocol.kvlayout import KvLayout, Tier
from pdserve.protocol.link import FAILURES, ROLE_NUMBERS, ROLES, STAGES, TIERS, layout_from_proto, peer_from_proto
from pdserve.protocol.prefix_hash import HASH_BYTES, short_hashes
from pdserve.protocol.reports import LoadPart, ReportedLoad
from pdserve.protocol.sampling import PromptLogprobs
from pdserve.protocol.token_ids import to_wire
from pdserve.router.requests.commands import CancelAttempt, Fetch, Move, Place, SendProcessGone, SequenceSpec
from pdserve.router.requests.events import (
    AttemptFailed,
    DrainAsked,
    KvChanged,
    LinkId,
    LoadReported,
    PairMeasured,
    PromptScored,
    Registration,
    RoleAsked,
    StageReached,
    StepReported,
    WorkerEvent,
)
from pdserve.router.requests.timeline import Ledger, Usage

MAX_DEVICE_BYTES = 128
MAX_LAUNCH_ID_BYTES = 64
MAX_TRIAL_STEPS = 64
_UNKNOWN_LAYOUT = KvLayout("", 0, 0, 0, 0, "")  # of a worker that loads: nothing is placed on it

# Values that are written and read field by field have the fields of their messages.
_OTHERS, _USAGE, _LEDGER = (
    tuple(message.DESCRIPTOR.fields_by_name) for message in (link.OthersLoad, inference.Usage, inference.Ledger)
)


def worker_events(link_id: LinkId, message: link.AttachRequest) -> list[WorkerEvent]:
    """Return what a worker's message means, in order; ProtocolError for one that means nothing.

    Repeated fields are made lists of by slicing: protobuf walks them at half the speed.
    """
    kind = message.WhichOneof("message")
    if kind != "step":
        return [_worker_event(link_id, message, kind)]
    report = message.step
    deltas, prompts = report.deltas[:], tuple([_prompt(prompt) for prompt in report.prompts[:]])
    costs = report.costs[:]
    events: list[WorkerEvent] = [_step(link_id, (), cost, ()) for cost in costs[:-1]]
    events += [_stage(link_id, progress) for progress in report.progress[:]]
    if costs:
        events.append(_step(link_id, deltas, costs[-1], prompts))
    elif deltas or prompts:
        events.append(StepReported(link_id, deltas, prompts=prompts))
    return events


def _step(
    link_id: LinkId, deltas: Seq[link.TokenDelta], cost: link.StepCost, prompts: Seq[PromptScored]
) -> StepReported:
    timed = read_cost(cost)
    return StepReported(link_id, deltas, timed.step, timed.elapsed_s, prompts, cost.age_us / 1e6)


def _worker_event(link_id: LinkId, message: link.AttachRequest, kind: str | None) -> WorkerEvent:
    match kind:
        case "heartbeat":
            return LoadReported(link_id, _load(message.heartbeat))
        case "pair":
            return _pair(link_id, message.pair)
        case "failed":
            return _failed(link_id, message.failed)
        case "kv_events":
            return _kv_changed(link_id, message.kv_events)
        case "register":
            return _registration(link_id, message.register)
        case _:
            raise ProtocolError("message: none of those that a worker sends")


def _load(beat: link.Heartbeat) -> ReportedLoad:
    others = LoadPart(**{name: getattr(beat.others, name) for name in _OTHERS})
    pages_lost = beat.pages_quarantined + beat.pages_leaked
    return ReportedLoad(
        pages_free=beat.pages_free,
        pages_wanted=beat.pages_wanted,
        pages_lost=pages_lost,
        draining=beat.draining,
        failed_steps=beat.failed_steps,
        others=others,
        role=ROLES.get(beat.role),
        role_epoch=beat.role_epoch,
    )


def _stage(link_id: LinkId, progress: link.Progress) -> StageReached:
    stage = STAGES.get(progress.stage)
    if stage is None:
        raise ProtocolError(f"progress.stage: {progress.stage} is unknown")
    return StageReached(
        link_id,
        RequestId(progress.request_id),
        Attempt(progress.attempt),
        stage,
        progress.age_us / 1e6,
        progress.cached_tokens,
        progress.handoff_bytes,
        progress.handoff_us / 1e6,
        progress.pages_reused,
    )


def _prompt(prompt: link.PromptDelta) -> PromptScored:
    logprobs = PromptLogprobs(prompt.chosen, prompt.top_ids, prompt.top)
    num_tokens, num_cut = divmod(len(prompt.chosen), 4)
    if not num_tokens or num_cut:
        raise ProtocolError(f"prompt.chosen: {len(prompt.chosen)} bytes, four a token are needed")
    if len(prompt.top) != len(prompt.top_ids) or len(prompt.top) % len(prompt.chosen):
        raise ProtocolError(f"prompt.top: {len(prompt.top_ids)} and {len(prompt.top)} bytes for {num_tokens} tokens")
    return PromptScored(RequestId(prompt.request_id), Attempt(prompt.attempt), prompt.position, logprobs)


def _kv_changed(link_id: LinkId, changes: link.KvEvents) -> KvChanged:
    for field, packed in (("stored", changes.stored), ("removed", changes.removed)):
        if len(packed) % HASH_BYTES:
            raise ProtocolError(f"kv_events.{field}: {len(packed)} bytes, a multiple of {HASH_BYTES} is needed")
    tier = TIERS.get(changes.tier) if changes.tier else Tier.DEVICE
    return KvChanged(link_id, short_hashes(changes.stored), short_hashes(changes.removed), tier)


def _pair(link_id: LinkId, pair: link.PairMeasured) -> PairMeasured:
    if not pair.bytes_per_s:
        raise ProtocolError("pair.bytes_per_s: has to be over 0")
    decode = WorkerId(pair.decode_worker_id)
    return PairMeasured(link_id, decode, float(pair.bytes_per_s), pair.carrier, pair.is_slow)


def _failed(link_id: LinkId, failed: link.Failed) -> AttemptFailed:
    failure = FAILURES.get(failed.code)
    if failure is None:
        raise ProtocolError(f"failed.code: {failed.code} is unknown")
    return AttemptFailed(link_id, RequestId(failed.request_id), Attempt(failed.attempt), failure, failed.detail)


def _registration(link_id: LinkId, register: link.Register) -> Registration:
    role = ROLES.get(register.role)
    if role is None:
        raise ProtocolError(f"register.role: {register.role} is unknown")
    if len(register.device.encode()) > MAX_DEVICE_BYTES:
        raise ProtocolError(f"register.device: {len(register.device.encode())} bytes, {MAX_DEVICE_BYTES} are allowed")
    if len(register.launch_id.encode()) > MAX_LAUNCH_ID_BYTES:
        raise ProtocolError(f"register.launch_id: at most {MAX_LAUNCH_ID_BYTES} bytes are allowed")
    if len(register.trial_steps) > MAX_TRIAL_STEPS:
        raise ProtocolError(f"register.trial_steps: {len(register.trial_steps)}, {MAX_TRIAL_STEPS} are allowed")
    if register.ready and not (register.max_num_seqs and register.max_model_len and register.max_num_batched_tokens):
        raise ProtocolError("register: max_num_seqs, max_model_len and max_num_batched_tokens have to be over 0")
    return Registration(
        link_id,
        *peer_from_proto(register, "register"),
        role=role,
        protocol_version=register.protocol_version,
        ready=register.ready,
        model=register.model,
        layout=layout_from_proto(register.layout) if register.ready else _UNKNOWN_LAYOUT,
        num_pages=register.num_pages,
        max_num_seqs=register.max_num_seqs,
        max_model_len=register.max_model_len,
        handoff_address=register.handoff_address,
        max_num_batched_tokens=register.max_num_batched_tokens,
        most_step_tokens=register.most_step_tokens,
        age_s=register.age_ms / 1000,
        device=register.device,
        role_epoch=register.role_epoch,
        trial=tuple(map(read_cost, register.trial_steps)),
        adapters=_adapters(register),
    )


def _adapters(register: link.Register) -> tuple[Adapter, ...]:
    if len(register.adapters) > MAX_ADAPTERS:
        raise ProtocolError(f"register.adapters: {len(register.adapters)}, {MAX_ADAPTERS} are allowed")
    adapters = tuple([Adapter(each.name, each.digest) for each in register.adapters])
    for each in adapters:
        if not 0 < len(each.name.encode()) <= MAX_NAME_BYTES:
            raise ProtocolError(f"register.adapters: names have to be of 1 to {MAX_NAME_BYTES} bytes")
        if len(each.digest) != DIGEST_BYTES:
            raise ProtocolError(f"register.adapters: {each.name} has a digest of {len(each.digest)} bytes")
    if len({each.name for each in adapters}) < len(adapters):
        raise ProtocolError("register.adapters: a name is there twice")
    return adapters


def messages(
    command: Place | Move | CancelAttempt | DrainAsked | RoleAsked | SendProcessGone,
) -> list[tuple[LinkId, link.AttachResponse]]:
    """Return which worker is sent what for a command."""
    match command:
        case Place():
            return _placement(command)
        case Move():
            return _move(command)
        case CancelAttempt(link_id, request_id, attempt, indices):
            cancel = link.Cancel(request_id=request_id, attempt=attempt, indices=indices)
            return [(link_id, link.AttachResponse(cancel=cancel))]
        case DrainAsked(link_id, cancel):
            return [(link_id, link.AttachResponse(drain=link.Drain(cancel=cancel)))]
        case RoleAsked(link_id, role, epoch):
            return [(link_id, link.AttachResponse(set_role=link.SetRole(role=ROLE_NUMBERS[role], epoch=epoch)))]
        case SendProcessGone(link_id, process):
            gone = link.ProcessGone(worker_id=process.worker_id, incarnation=process.incarnation)
            return [(link_id, link.AttachResponse(process_gone=gone))]


def _placement(place: Place) -> list[tuple[LinkId, link.AttachResponse]]:
    """Return a message for the worker that decodes and, where there is one, one for that which computes the prompt."""
    prefill, decode, spec = place.prefill, place.decode, _spec(place.spec)
    messages = []
    if decode is not None:
        message = link.AttachResponse()
        message.place.spec.CopyFrom(spec)
        if prefill is not None:
            message.place.source.CopyFrom(_worker_ref(prefill))
        messages.append((decode.link, message))
    if prefill is not None:
        message = link.AttachResponse()
        message.place.spec.CopyFrom(spec)
        if decode is not None:
            message.place.target.CopyFrom(_worker_ref(decode))
        messages.append((prefill.link, message))
        if place.fetch is not None:
            messages.append(_share(place, prefill, place.fetch, message.place))
    return messages


def _share(place: Place, prefill: Registration, fetch: Fetch, job: link.Place) -> tuple[LinkId, link.AttachResponse]:
    """Name the fetch in the job of the worker that computes the prompt; return the message for the holder."""
    within_ms, spec = round(fetch.within_s * 1e3), place.spec
    job.fetch.CopyFrom(link.Fetch(holder=_worker_ref(fetch.holder), num_tokens=fetch.num_tokens, within_ms=within_ms))
    share = link.Share(
        request_id=spec.request_id,
        attempt=spec.attempt,
        token_ids=to_wire(spec.token_ids[: fetch.num_tokens]),
        cache_salt=spec.scope.salt,
        adapter=spec.scope.adapter,
        target=_worker_ref(prefill),
        within_ms=within_ms,
    )
    return fetch.holder.link, link.AttachResponse(share=share)


def _move(move: Move) -> list[tuple[LinkId, link.AttachResponse]]:
    place = link.Place(spec=_spec(move.spec), source=_worker_ref(move.source), extra_tokens=move.extra_tokens)
    (index,) = move.spec.indices
    asked = link.Move(
        request_id=move.spec.request_id,
        attempt=move.attempt,
        index=index,
        new_attempt=move.spec.attempt,
        target=_worker_ref(move.target),
        num_tokens=len(move.spec.token_ids),
    )
    return [
        (move.target.link, link.AttachResponse(place=place)),
        (move.source.link, link.AttachResponse(move=asked)),
    ]


def _worker_ref(worker: Registration) -> link.WorkerRef:
    return link.WorkerRef(
        worker_id=worker.worker_id, incarnation=worker.incarnation, handoff_address=worker.handoff_address
    )


def _spec(spec: SequenceSpec) -> link.SequenceSpec:
    is_all, trace = len(spec.indices) == spec.params.n, spec.trace
    return link.SequenceSpec(
        request_id=spec.request_id,
        attempt=spec.attempt,
        token_ids=to_wire(spec.token_ids),
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=params_to_proto(spec.params),
        indices=() if is_all else spec.indices,
        cache_salt=spec.scope.salt,
        adapter=spec.scope.adapter,
        deadline_ms=round(spec.remaining_s * 1e3),
        priority=spec.priority,
        traceparent=trace.traceparent if trace else "",
        tracestate=trace.tracestate if trace else "",
    )


def usage_message(usage: Usage) -> inference.Usage:
    return inference.Usage(**{name: getattr(usage, name) for name in _USAGE})


def ledger_message(ledger: Ledger) -> inference.Ledger:
    steps = [inference.LedgerStep(name=stage.value, at_ms=at_ms) for stage, at_ms in ledger.steps]
    moves = [inference.LedgerMove(**asdict(moved)) for moved in ledger.moves]
    drafts = {source: inference.LedgerDrafts(**asdict(counted)) for source, counted in ledger.drafts.items()}
    fields = {name: getattr(ledger, name) for name in _LEDGER}
    return inference.Ledger(**{**fields, "steps": steps, "moves": moves, "drafts": drafts})
