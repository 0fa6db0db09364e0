"""What is checked of a request before anything is done for it. Errors name the field, its value and the limit."""

import math
from dataclasses import dataclass, replace

from pdserve.checkpoint.checkpoint import GenerationDefaults
from pdserve.errors import RequestError, Status, echo, invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.sampling import SamplingParams
from pdserve.text.stop import check_stops

MAX_TENANT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request asks for, besides its prompt."""

    params: SamplingParams
    may_be_shorter: bool  # the request leaves max_tokens out
    stops: tuple[str, ...]
    priority: int
    tenant: str
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    deadline_s: float  # from its arrival on


def check_terms(
    request: inference.GenerateRequest,
    vocab_size: int,
    random_seed: int,
    max_deadline_ms: int,
    defaults: GenerationDefaults,
) -> Terms:
    """Return a request's terms with defaults filled in; RequestError for the first field out of range."""
    params = _sampling(request.sampling, random_seed, defaults)
    params.validate(vocab_size)
    check_stops(request.stop)
    num_bytes = len(request.tenant.encode())
    if num_bytes > MAX_TENANT_BYTES:
        raise invalid("tenant", f"{num_bytes} bytes are over the limit of {MAX_TENANT_BYTES}")
    deadline_ms = request.deadline_ms if request.HasField("deadline_ms") else max_deadline_ms
    if not 0 < deadline_ms <= max_deadline_ms:
        raise invalid("deadline_ms", f"{deadline_ms} is outside [1, {max_deadline_ms}]")
    return Terms(
        params=params,
        may_be_shorter=not request.sampling.HasField("max_tokens"),
        stops=tuple(request.stop),
        priority=request.priority,
        tenant=request.tenant,
        ttft_slo_s=_slo_s("ttft_ms", request.slo.ttft_ms if request.slo.HasField("ttft_ms") else None),
        tpot_slo_s=_slo_s("tpot_ms", request.slo.tpot_ms if request.slo.HasField("tpot_ms") else None),
        deadline_s=deadline_ms / 1e3,
    )


def check_model(request: inference.GenerateRequest, name: str) -> None:
    """Raise RequestError(NOT_FOUND) unless the request is for the model that is served."""
    if request.model not in ("", name):
        raise RequestError(
            Status.NOT_FOUND, f"model: {echo(request.model, repr)} is not served here; {echo(name, repr)} is"
        )


def fitted(num_prompt_tokens: int, terms: Terms, max_model_len: int) -> SamplingParams:
    """Return a request's sampling, with a max_tokens it left out cut to the room there is; RequestError for no room."""
    params, room = terms.params, max_model_len - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise invalid("prompt", "it has no tokens, at least 1 is needed")
    if terms.may_be_shorter and max(1, params.min_tokens) <= room < params.max_tokens:
        return replace(params, max_tokens=room)
    if num_prompt_tokens + params.max_tokens > max_model_len:
        raise invalid(
            "max_tokens",
            f"{num_prompt_tokens} prompt tokens and max_tokens {params.max_tokens} are "
            f"{num_prompt_tokens + params.max_tokens} together, over the limit of {max_model_len} (max_model_len)",
        )
    return params


def _slo_s(field: str, milliseconds: float | None) -> float | None:
    if milliseconds is None:
        return None
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        raise invalid(f"slo.{field}", f"{milliseconds} is not a number of milliseconds over 0")
    return milliseconds / 1e3


def _sampling(asked: inference.SamplingParams, random_seed: int, defaults: GenerationDefaults) -> SamplingParams:
    """Return what is asked for over the defaults. The model's max_tokens limits what is asked for, too."""
    given = {field.name: value for field, value in asked.ListFields()}
    given |= {
        "seed": asked.seed if asked.HasField("seed") else random_seed,
        "logit_bias": tuple(asked.logit_bias.items()),
        "stop_token_ids": tuple(asked.stop_token_ids),
    }
    params = SamplingParams(**defaults.sampling() | given)
    if defaults.max_tokens is None or params.max_tokens <= defaults.max_tokens:
        return params
    return replace(params, max_tokens=defaults.max_tokens)
