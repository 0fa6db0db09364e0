"""Translates requests of the Open Inference Protocol to GenerateRequests, and texts to its tensors."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from pdserve.base.errors import echo
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import open_inference_pb2 as protocol
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.router.frontend.conversations import json_object

VERSION = "1"  # of the one model
TEXT_INPUT, STREAM, SAMPLING = "text_input", ("stream", "streaming"), "sampling_parameters"
TEXT_OUTPUT, FINISH_REASON = OUTPUTS = ("text_output", "finish_reason")

Value = bool | int | float | str | list[object]

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
)
_REQUEST, _SLO = ("priority", "deadline_ms", "tenant", "stop"), ("ttft_ms", "tpot_ms")
_UNUSED = frozenset({"sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response", "timeout"})


@dataclass(frozen=True, slots=True)
class Asked:
    request: inference.GenerateRequest
    streams: bool
    outputs: frozenset[str]  # that are wanted


def native(message: protocol.ModelInferRequest) -> Asked:
    """Return what a client asks for; RefusedError for what has no meaning here."""
    check_version(message.model_name, message.model_version)
    inputs = _inputs(message)
    if TEXT_INPUT not in inputs:
        raise invalid(TEXT_INPUT, "the request has no such input")
    request = inference.GenerateRequest(model=message.model_name, text=_text(TEXT_INPUT, inputs.pop(TEXT_INPUT)))
    parameters = json_object(SAMPLING, _text(SAMPLING, inputs.pop(SAMPLING))) if SAMPLING in inputs else {}
    streams = [_flag(name, inputs.pop(name)) for name in STREAM if name in inputs]
    if inputs:
        raise invalid("inputs", f"{echo(min(inputs), repr)} is none of {TEXT_INPUT}, {STREAM[0]} and {SAMPLING}")
    parameters |= {name: _value(parameter) for name, parameter in message.parameters.items()}
    for name, value in parameters.items():
        if name not in _UNUSED:
            _set(request, name, value)
    outputs = frozenset(output.name for output in message.outputs)
    if not outputs.issubset(OUTPUTS):
        raise invalid(
            "outputs", f"{echo(min(outputs.difference(OUTPUTS)), repr)} is neither of {' and '.join(OUTPUTS)}"
        )
    return Asked(request, any(streams), outputs or frozenset(OUTPUTS))


def check_version(name: str, version: str) -> None:
    """Raise RefusedError for any version but the one that is served."""
    if version not in ("", VERSION):
        raise RefusedError(Refused(Cause.MODEL, f"version: {echo(version, repr)} of {echo(name, repr)} is not served"))


def reply(
    asked: Asked, message: protocol.ModelInferRequest, text: str, finish_reason: int
) -> protocol.ModelInferResponse:
    """Return a reply with those outputs that the client wants. finish_reason 0: the reply is not the last."""
    response = protocol.ModelInferResponse(
        model_name=message.model_name, model_version=message.model_version or VERSION, id=message.id
    )
    response.parameters["triton_final_response"].bool_param = bool(finish_reason)
    values = {TEXT_OUTPUT: text}
    if finish_reason:
        values[FINISH_REASON] = "length" if finish_reason == inference.FINISH_REASON_LENGTH else "stop"
    for name, value in values.items():
        if name in asked.outputs:
            response.outputs.add(name=name, datatype="BYTES", shape=[1])
            data = value.encode()
            response.raw_output_contents.append(struct.pack("<I", len(data)) + data)
    return response


# ---- tensors


def _inputs(message: protocol.ModelInferRequest) -> dict[str, bytes | bool]:
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise invalid("raw_input_contents", f"{len(raw)} are given for {len(message.inputs)} inputs")
    if twice := [name for name, count in Counter(tensor.name for tensor in message.inputs).items() if count > 1]:
        raise invalid("inputs", f"{echo(twice[0], repr)} is there more than once")
    return {tensor.name: _one(tensor, raw[place] if raw else None) for place, tensor in enumerate(message.inputs)}


def _one(tensor: protocol.ModelInferRequest.InferInputTensor, raw: bytes | None) -> bytes | bool:
    """Return a tensor's one value. A tensor with many values is refused without making an object of each."""
    values: Sequence[bytes | bool]
    match tensor.datatype:
        case "BYTES":
            values = tensor.contents.bytes_contents if raw is None else _elements(tensor.name, raw)
        case "BOOL":
            values = tensor.contents.bool_contents if raw is None else [bool(byte) for byte in raw[:2]]
        case other:
            raise invalid(tensor.name, f"datatype {echo(other, repr)} is neither BYTES nor BOOL")
    if len(values) != 1 or any(size != 1 for size in tensor.shape):
        found = "no value" if not values else "1 value" if len(values) == 1 else "more values than one"
        raise invalid(tensor.name, f"{found} of shape {list(tensor.shape[:4])}, exactly one of shape [1] is needed")
    return values[0]


def _elements(name: str, raw: bytes) -> list[bytes]:
    """Return the elements of a BYTES tensor, at most two of them."""
    elements: list[bytes] = []
    start = 0
    while start + 4 <= len(raw) and len(elements) < 2:
        (size,) = struct.unpack_from("<I", raw, start)
        elements.append(raw[start + 4 : start + 4 + size])
        start += 4 + size
    if len(elements) < 2 and start != len(raw):
        raise invalid(name, f"its {len(raw)} bytes are no elements with their lengths")
    return elements


def _text(name: str, value: bytes | bool) -> str:
    if not isinstance(value, bytes):
        raise invalid(name, "datatype 'BOOL' is not BYTES")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"it is not UTF-8: {error}") from error


def _flag(name: str, value: bytes | bool) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, "datatype 'BYTES' is not BOOL")
    return value


# ---- parameters


def _value(parameter: protocol.InferParameter) -> Value:
    kind = parameter.WhichOneof("parameter_choice")
    value: Value = "" if kind is None else getattr(parameter, kind)
    return value


def _set(request: inference.GenerateRequest, name: str, value: Value) -> None:
    """Set the field that a parameter stands for. Clients that can send text alone may write its value as text."""
    message: Message = request
    if name in _SAMPLING:
        message = request.sampling
    elif name in _SLO:
        message = request.slo
    elif name not in _REQUEST:
        known = ", ".join((*_SAMPLING, *_REQUEST, *_SLO))
        raise invalid("parameters", f"{echo(name, repr)} is none of {known}")
    field = message.DESCRIPTOR.fields_by_name[name]
    takes_bool = field.type == FieldDescriptor.TYPE_BOOL
    if takes_bool and value in (0, 1, "true", "false"):
        value = value in (1, "true")
    if name == "stop" and value is not None and not isinstance(value, list):
        value = [value]
    try:
        if isinstance(value, bool) and not takes_bool:
            raise ParseError("it is true or false")
        ParseDict({name: value}, message)
    except ParseError as error:
        raise invalid(name, f"{echo(str(value))} is not of its type: {echo(str(error))}") from error
