"""Values that processes exchange, as messages of the protos and back."""

from collections.abc import Iterable
from typing import Any, get_args

from pdserve.errors import ProtocolError, RequestError, invalid
from pdserve.kvlayout import DTYPE_BYTES, PAGE_DIGESTS, KvLayout
from pdserve.perfmodel.curve import ENOUGH_STEPS, Curve, DecodePiece
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.reports import NUM_BANDS, Demand
from pdserve.roles import Role
from pdserve.sampling import MAX_LOGPROBS, Format, SamplingParams, StructuredOutput, TokenLogprobs


def most_seen(learnt: Iterable[admin.LearntCosts], role: "link.Role.ValueType") -> admin.LearntCosts:
    """Return the costs of a role with the most steps; empty costs where there are none. Kinds differ by device."""
    kinds = [costs for costs in learnt if costs.role == role]
    return max(kinds, key=lambda c: c.num_prefill_steps + c.num_decode_steps, default=admin.LearntCosts(role=role))


def prefill_curve(learnt: admin.LearntCosts) -> Curve:
    return Curve(learnt.prefill_step_s, learnt.prefill_token_s, learnt.prefill_work_s)


def decode_pieces(learnt: admin.LearntCosts) -> tuple[DecodePiece, ...]:
    """Return decode costs by size of batch; those of the largest size hold for all larger ones."""
    known = [batches for batches in learnt.decode_batches if batches.num_steps >= ENOUGH_STEPS]
    if not known:
        curve = Curve(learnt.decode_step_s, learnt.decode_sequence_s, learnt.decode_kv_token_s)
        return (DecodePiece(None, curve),)
    sizes = [batches.max_sequences for batches in known[:-1]]
    return tuple(
        DecodePiece(size, Curve(batches.step_s, batches.sequence_s, batches.kv_token_s))
        for size, batches in zip([*sizes, None], known, strict=True)
    )


_FIELDS = tuple(name for name in SamplingParams.__annotations__ if name != "structured_output")
_LISTS = {"stop_token_ids", "allowed_token_ids"}
_FORMATS: dict[str | None, Format] = {name: name for name in get_args(Format)}


def params_to_proto(params: SamplingParams) -> inference.SamplingParams:
    """Write sampling with every field set, except log probabilities and structured output if they are not wanted."""
    fields = {name: getattr(params, name) for name in _FIELDS}
    fields["logit_bias"] = dict(params.logit_bias)
    fields["bad_word_ids"] = [inference.TokenIds(ids=word) for word in params.bad_word_ids]
    message = inference.SamplingParams(**fields)
    if params.structured_output is not None:
        message.structured_output.CopyFrom(structured_to_proto(params.structured_output))
    return message


def params_from_proto(message: inference.SamplingParams) -> SamplingParams:
    """Return sampling as `params_to_proto` writes it; ProtocolError for what it never writes."""
    try:
        return SamplingParams(**given_params(message))
    except RequestError as error:
        raise ProtocolError(error.message) from error


def given_params(message: inference.SamplingParams) -> dict[str, Any]:
    """Return the fields of SamplingParams that a message sets; RequestError as `structured_from_proto`."""
    given = {field.name: value for field, value in message.ListFields() if field.name in _FIELDS}
    for name in _LISTS & given.keys():
        given[name] = tuple(given[name])
    if message.logit_bias:
        given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    if message.bad_word_ids:
        given["bad_word_ids"] = tuple([tuple(word.ids) for word in message.bad_word_ids])
    if message.HasField("structured_output"):
        given["structured_output"] = structured_from_proto(message.structured_output)
    return given


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
    """Return what a text must match; RequestError(INVALID_ARGUMENT) if the message names no format."""
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


_BANDS = ("prompts", "answers")
_PARTS = tuple(admin.Demand.DESCRIPTOR.fields_by_name)


def demand_to_proto(demand: Demand) -> admin.Demand:
    return admin.Demand(**{name: getattr(demand, name) for name in _PARTS})


def demand_from_proto(message: admin.Demand) -> Demand:
    """Return what a router has counted; ProtocolError if it counts in other bands."""
    parts: dict[str, Any] = {name: getattr(message, name) for name in _PARTS}
    for name in _BANDS:
        parts[name] = tuple(parts[name])
        if len(parts[name]) != NUM_BANDS:
            raise ProtocolError(f"demand.{name}: {len(parts[name])} bands, {NUM_BANDS} are expected")
    return Demand(**parts)


ROLES = {link.Role.Value(f"ROLE_{role.name}"): role for role in Role}
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}


def layout_to_proto(layout: KvLayout) -> link.KvLayout:
    return link.KvLayout(**{name: getattr(layout, name) for name in KvLayout.__slots__})


def layout_from_proto(message: link.KvLayout) -> KvLayout:
    """Return the layout that a peer reports; ProtocolError names the first impossible field."""
    layout = KvLayout(**{name: getattr(message, name) for name in KvLayout.__slots__})
    if layout.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"layout.dtype: {layout.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if layout.page_digest not in PAGE_DIGESTS:
        raise ProtocolError(f"layout.page_digest: {layout.page_digest!r} is none of {', '.join(PAGE_DIGESTS)}")
    for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "tp_size"):
        if getattr(layout, name) < 1:
            raise ProtocolError(f"layout.{name}: must be at least 1")
    return layout
