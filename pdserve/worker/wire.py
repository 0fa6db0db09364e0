"""Messages of link.proto as a worker's core knows them, and back.

What a router says is checked here: ProtocolError names the field. Only durations are on the wire; they become
readings of this process's clock on arrival.
"""

from collections.abc import Iterable, Iterator, Mapping

from pdserve.engine.sequence import Finish, Job
from pdserve.engine.step import StepPlan, StepResult, TokenLogprobs
from pdserve.errors import ProtocolError, Refusal
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer.session import Peer
from pdserve.perfmodel.curve import attention_work
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.sampling import SamplingParams
from pdserve.worker.words import (
    Cancelled,
    DrainAsked,
    Failed,
    FailureCode,
    Load,
    Placed,
    Progress,
    Report,
    RouterRef,
    Rung,
    Tokens,
)

REQUEST_ID_BYTES = 16

_FINISH = {Finish.STOP: inference.FINISH_REASON_STOP, Finish.LENGTH: inference.FINISH_REASON_LENGTH}
_RUNG = {rung: link.Rung.Value(f"RUNG_{rung.name}") for rung in Rung}
_FAILURE = {code: link.FailureCode.Value(f"FAILURE_CODE_{code.name}") for code in FailureCode}


def gone_process(message: link.ProcessGone) -> Peer:
    """Return the process that a ProcessGone speaks of."""
    return Peer(WorkerId(message.worker_id), Incarnation(message.incarnation))


def command(message: link.AttachResponse, router: RouterRef, now_s: float) -> Placed | Cancelled | DrainAsked | None:
    """Return what a router asks of the core; None for what concerns the shell alone."""
    match message.WhichOneof("message"):
        case "prefill":
            peer = _peer(message.prefill.decode_worker_id, message.prefill.decode_incarnation)
            return _placed(message.prefill.spec, router, now_s, peer, message.prefill.handoff_address)
        case "decode":
            peer = _peer(message.decode.prefill_worker_id, message.decode.prefill_incarnation)
            return _placed(message.decode.spec, router, now_s, peer, "")
        case "cancel":
            cancel = message.cancel
            return Cancelled(_request_id(cancel.request_id), Attempt(cancel.attempt), tuple(cancel.indices))
        case "drain":
            return DrainAsked()
        case _:
            return None


def step_report(
    tokens: Iterable[Tokens], rungs: Iterable[Progress], step: tuple[StepPlan, StepResult], now_s: float
) -> link.AttachRequest:
    """Return one message for everything that a step brought to one router."""
    plan, result = step
    prefill = [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]
    return link.AttachRequest(
        step=link.StepReport(
            deltas=[_delta(t) for t in tokens],
            elapsed_us=round(result.elapsed_s * 1e6),
            prefill_tokens=sum(len(chunk.token_ids) for chunk in prefill),
            decode_sequences=len(plan.chunks) - len(prefill),
            context_tokens=sum(chunk.start + len(chunk.token_ids) for chunk in plan.chunks),
            progress=[_progress(rung, now_s) for rung in rungs],
            prefill_work=sum(attention_work(len(chunk.token_ids), chunk.start) for chunk in prefill),
            decode_kv_tokens=sum(chunk.start + 1 for chunk in plan.chunks if len(chunk.token_ids) == 1),
        )
    )


def report(word: Report, now_s: float) -> link.AttachRequest:
    """Return the message for one report outside of a step."""
    match word:
        case Progress():
            return link.AttachRequest(progress=_progress(word, now_s))
        case Failed():
            return link.AttachRequest(
                failed=link.Failed(
                    request_id=word.key.request_id,
                    attempt=word.key.attempt,
                    code=_FAILURE[word.code],
                    detail=word.reason,
                )
            )
        case Tokens():
            return link.AttachRequest(step=link.StepReport(deltas=[_delta(word)]))


def heartbeat(load: Load, num_steps: int, refused: Mapping[Refusal, int]) -> link.AttachRequest:
    """Return the message that says how full this worker is, and what it has refused."""
    told = {name: getattr(load, name) for name in Load.__slots__}
    counts = {refusal.value: count for refusal, count in refused.items()}
    return link.AttachRequest(heartbeat=link.Heartbeat(num_steps=num_steps, refused=counts, **told))


def sampling_params(message: inference.SamplingParams) -> SamplingParams:
    """Return sampling as a router sends it: every field set."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        n=message.n,
    )


def _placed(spec: link.SequenceSpec, router: RouterRef, now_s: float, peer: Peer | None, peer_address: str) -> Placed:
    params = sampling_params(spec.sampling)
    job = Job(
        request_id=_request_id(spec.request_id),
        attempt=Attempt(spec.attempt),
        token_ids=tuple(spec.token_ids),
        num_prompt_tokens=spec.num_prompt_tokens,
        params=params,
        indices=tuple(spec.indices) or tuple(range(params.n)),
        cache_salt=spec.cache_salt,
        priority=spec.priority,
    )
    return Placed(router, job, now_s + spec.deadline_ms / 1000, peer, peer_address)


def _peer(worker_id: str, incarnation: int) -> Peer | None:
    return Peer(WorkerId(worker_id), Incarnation(incarnation)) if worker_id else None


def _request_id(value: bytes) -> RequestId:
    if len(value) != REQUEST_ID_BYTES:
        raise ProtocolError(f"request_id: {len(value)} bytes, {REQUEST_ID_BYTES} are needed")
    return RequestId(value)


def _progress(word: Progress, now_s: float) -> link.Progress:
    return link.Progress(
        request_id=word.key.request_id,
        attempt=word.key.attempt,
        rung=_RUNG[word.rung],
        age_us=max(0, round((now_s - word.at_s) * 1e6)),
        cached_tokens=word.cached_tokens,
        handoff_bytes=word.handoff_bytes,
        handoff_us=round(word.handoff_s * 1e6),
        pages_reused=word.pages_reused,
    )


def _delta(tokens: Tokens) -> link.TokenDelta:
    delta = link.TokenDelta(
        request_id=tokens.key.request_id,
        attempt=tokens.key.attempt,
        index=tokens.index,
        position=tokens.position,
        token_ids=[tokens.token.token_id],
    )
    if tokens.token.logprobs is not None:
        delta.logprobs.append(_logprobs(tokens.token.logprobs))
    if tokens.finish is not None:
        delta.finish_reason = _FINISH[tokens.finish]
    return delta


def _logprobs(logprobs: TokenLogprobs) -> inference.TokenLogprobs:
    top: Iterator[inference.TokenLogprob] = (
        inference.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top
    )
    return inference.TokenLogprobs(chosen=logprobs.chosen, top=list(top))
