"""Messages of inference.proto as values that processes exchange, and back."""

from typing import Any, get_args

from pdserve.base.errors import ProtocolError
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.pooling import Kind, Pooling
from pdserve.protocol.refusal import RefusedError, invalid
from pdserve.protocol.sampling import MAX_LOGPROBS, Format, SamplingParams, StructuredOutput, TokenLogprobs

_FIELDS = tuple(name for name in SamplingParams.__annotations__ if name not in ("structured_output", "pooling"))
_LISTS = {"stop_token_ids", "allowed_token_ids"}
_FORMATS: dict[str | None, Format] = {name: name for name in get_args(Format)}
_KINDS: dict[int, Kind] = {inference.PoolingKind.Value(f"POOLING_KIND_{kind.upper()}"): kind for kind in get_args(Kind)}
_KIND_NUMBERS = {kind: inference.PoolingKind.ValueType(number) for number, kind in _KINDS.items()}


def params_to_proto(params: SamplingParams) -> inference.SamplingParams:
    """Write sampling with every field set, except log probabilities and structured output if they are not wanted."""
    fields = {name: getattr(params, name) for name in _FIELDS}
    fields["logit_bias"] = dict(params.logit_bias)
    fields["bad_word_ids"] = [inference.TokenIds(ids=word) for word in params.bad_word_ids]
    message = inference.SamplingParams(**fields)
    if params.structured_output is not None:
        message.structured_output.CopyFrom(structured_to_proto(params.structured_output))
    if params.pooling is not None:
        message.pooling.CopyFrom(pooling_to_proto(params.pooling))
    return message


def params_from_proto(message: inference.SamplingParams) -> SamplingParams:
    """Return sampling as `params_to_proto` writes it; ProtocolError for what it never writes."""
    try:
        return SamplingParams(**given_params(message))
    except RefusedError as error:
        raise ProtocolError(str(error)) from error


def given_params(message: inference.SamplingParams) -> dict[str, Any]:
    """Return the fields of SamplingParams that a message sets; RefusedError as `structured_from_proto`."""
    given = {field.name: value for field, value in message.ListFields() if field.name in _FIELDS}
    for name in _LISTS & given.keys():
        given[name] = tuple(given[name])
    if message.logit_bias:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_word_ids:
        given["bad_word_ids"] = tuple([tuple(word.ids) for word in message.bad_word_ids])
    if message.HasField("structured_output"):
        given["structured_output"] = structured_from_proto(message.structured_output)
    if message.HasField("pooling"):
        given["pooling"] = pooling_from_proto(message.pooling)
    return given


def pooling_to_proto(pooling: Pooling) -> inference.Pooling:
    return inference.Pooling(
        kind=_KIND_NUMBERS[pooling.kind], token_ids=pooling.token_ids, normalize=pooling.normalizes
    )


def pooling_from_proto(message: inference.Pooling) -> Pooling:
    """Return what is made of a prompt; RefusedError(INVALID_ARGUMENT) for a kind that is not known."""
    if message.kind not in _KINDS:
        raise invalid("pooling.kind", f"{message.kind} is none of {', '.join(_KINDS.values())}")
    return Pooling(_KINDS[message.kind], tuple(message.token_ids), message.normalize)


def structured_to_proto(structured: StructuredOutput) -> inference.StructuredOutput:
    message = inference.StructuredOutput()
    match structured.format:
        case "json_object":
            message.json_object = True
        case "choice":
            message.choice.texts.extend(structured.texts)
        case _:
            setattr(message, structured.format, structured.texts[0])
    return message


def structured_from_proto(message: inference.StructuredOutput) -> StructuredOutput:
    """Return what a text must match; RefusedError(INVALID_ARGUMENT) if the message names no format."""
    name = _FORMATS.get(message.WhichOneof("format"))
    match name:
        case None:
            formats = ", ".join(_FORMATS.values())
            raise invalid("structured_output", f"none was given; exactly one of {formats} is needed")
        case "json_object":
            if not message.json_object:
                raise invalid("structured_output.json_object", "false; leave structured_output out for any text")
            return StructuredOutput(name)
        case "choice":
            return StructuredOutput(name, tuple(message.choice.texts))
        case _:
            return StructuredOutput(name, (getattr(message, name),))


def logprobs_to_proto(logprobs: TokenLogprobs) -> inference.TokenLogprobs:
    message = inference.TokenLogprobs(chosen=logprobs.chosen)
    for token_id, logprob in logprobs.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def logprobs_from_proto(message: inference.TokenLogprobs) -> TokenLogprobs:
    """Return a peer's log probabilities of one position; ProtocolError for more than a request can ask for."""
    if len(message.top) > MAX_LOGPROBS:
        raise ProtocolError(f"logprobs.top: {len(message.top)} are over {MAX_LOGPROBS}")
    return TokenLogprobs(message.chosen, tuple((each.token_id, each.logprob) for each in message.top))
