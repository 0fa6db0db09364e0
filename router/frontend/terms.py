"""The terms of a request, checked before its prompt is read: sampling, limits, objectives.

Errors name the field, its value and the limit.
"""

import math
import secrets
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Literal

from pdserve.base.errors import echo
from pdserve.base.ids import new_request_id
from pdserve.checkpoint.checkpoint import GenerationDefaults
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.inference import given_params
from pdserve.protocol.refusal import invalid
from pdserve.protocol.sampling import MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, SamplingParams
from pdserve.router.frontend.served import ServedModel
from pdserve.router.requests.events import RequestArrived
from pdserve.text.stop import check_stops

MAX_TENANT_BYTES = 64
MAX_LABEL_BYTES = 128
MAX_SESSION_BYTES = 512
MAX_ANSWER_TOKENS = 2**31 - 1


def check_terms(
    request: inference.GenerateRequest, model: ServedModel, max_deadline_ms: int, received_s: float, remaining_s: float
) -> RequestArrived:
    """Return a request for the core, with defaults filled in and without its tokens.

    `remaining_s`: until the call's own deadline. RefusedError names the first field out of range.
    """
    pools = request.sampling.HasField("pooling")
    params = _pooling(request) if pools else _sampling(request.sampling, model.defaults)
    params.validate(model.vocab_size)
    check_stops(request.stop)
    _check_bad_words(request.sampling.bad_words)
    num_bytes = len(request.tenant.encode())
    if num_bytes > MAX_TENANT_BYTES:
        raise invalid("tenant", f"{num_bytes} bytes are over the limit of {MAX_TENANT_BYTES}")
    _check_label(request.request_label)
    num_bytes = len(request.session.encode())
    if num_bytes > MAX_SESSION_BYTES:
        raise invalid("session", f"{num_bytes} bytes are over the limit of {MAX_SESSION_BYTES}")
    if request.output_tokens > MAX_ANSWER_TOKENS:
        raise invalid("output_tokens", f"{request.output_tokens} is over the limit of {MAX_ANSWER_TOKENS}")
    deadline_ms = request.deadline_ms if request.HasField("deadline_ms") else max_deadline_ms
    if not 0 < deadline_ms <= max_deadline_ms:
        raise invalid("deadline_ms", f"{deadline_ms} is outside [1, {max_deadline_ms}]")
    return RequestArrived(
        request_id=new_request_id(),
        token_ids=(),
        params=params,
        received_s=received_s,
        deadline_s=received_s + min(deadline_ms / 1e3, remaining_s),
        priority=request.priority,
        tenant=request.tenant,
        ttft_slo_s=_slo_s(request.slo, "ttft_ms"),
        tpot_slo_s=_slo_s(request.slo, "tpot_ms"),
        session=request.session,
        output_tokens=request.output_tokens,
    )


def usable_label(label: str) -> str:
    """Return a client's name for a request, empty if the name cannot be kept."""
    return label if len(label) <= MAX_LABEL_BYTES and label.isascii() and label.isprintable() else ""


def _check_label(label: str) -> None:
    if usable_label(label) == label:
        return
    if len(label) > MAX_LABEL_BYTES:
        raise invalid("request_label", f"{len(label)} characters are over the limit of {MAX_LABEL_BYTES}")
    raise invalid("request_label", f"{echo(label, repr)} is not printable ASCII")


def _check_bad_words(words: Seq[str]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"{len(words)} are over the limit of {MAX_BAD_WORDS}")
    for word in words:
        num_bytes = len(word.encode())
        if not word.strip() or num_bytes > MAX_BAD_WORD_BYTES:
            limits = f"1 to {MAX_BAD_WORD_BYTES}, not all of them spaces, are needed"
            raise invalid("bad_words", f"{echo(word, repr)} has {num_bytes} bytes; {limits}")


def _slo_s(slo: inference.Slo, field: Literal["ttft_ms", "tpot_ms"]) -> float | None:
    if not slo.HasField(field):
        return None
    milliseconds: float = getattr(slo, field)
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        raise invalid(f"slo.{field}", f"{milliseconds} is not a number of milliseconds over 0")
    return milliseconds / 1e3


def _pooling(request: inference.GenerateRequest) -> SamplingParams:
    """Return what takes the place of sampling where a vector is wanted; RefusedError for fields of sampling."""
    given = [field.name for field, _ in request.sampling.ListFields()] + ["stop"] * bool(request.stop)
    if others := [name for name in given if name != "pooling"]:
        raise invalid(others[0], "does not go with pooling, for which nothing is generated")
    return SamplingParams(max_tokens=1, **given_params(request.sampling))


def _sampling(asked: inference.SamplingParams, defaults: GenerationDefaults) -> SamplingParams:
    """Return the request's values over the defaults. The model's max_tokens limits the request's, too."""
    given = given_params(asked)
    if asked.fill_model_len and not asked.HasField("max_tokens"):
        given["max_tokens"] = MAX_ANSWER_TOKENS
    params = SamplingParams(**{"seed": secrets.randbits(64)} | defaults.sampling() | given)
    if defaults.max_tokens is None or params.max_tokens <= defaults.max_tokens:
        return params
    return replace(params, max_tokens=defaults.max_tokens)
