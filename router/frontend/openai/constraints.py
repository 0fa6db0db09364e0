"""What a request over HTTP wants its answer to match: OpenAI's response_format, and vLLM's fields for the same."""

import json
from collections.abc import Iterator

from pdserve.errors import echo, invalid
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.openai.fields import Generation

Constraint = tuple[str, inference.StructuredOutput]  # and the field that asks for it
_VLLM = ("json", "json_object", "regex", "choice", "grammar")
_ITS_OPTIONS = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend"})


def constraint_of(body: Generation) -> Constraint | None:
    """Return what the answer is to match; RequestError(INVALID_ARGUMENT) where fields contradict each other."""
    found = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if len(found) > 1:
        raise invalid(found[1][0], f"goes against {found[0][0]}: an answer matches one of them")
    return found[0] if found else None


def _response_format(body: Generation) -> Iterator[Constraint]:
    asked = body.response_format or {}
    match asked.get("type", "text"):
        case "text":
            return
        case "json_object":
            yield "response_format", inference.StructuredOutput(json_object=True)
        case "json_schema":
            outer = asked.get("json_schema")
            schema = outer.get("schema") if isinstance(outer, dict) else None
            if not isinstance(schema, dict):
                raise invalid("response_format.json_schema.schema", f"{echo(json.dumps(schema))} is no JSON object")
            yield "response_format.json_schema.schema", inference.StructuredOutput(json_schema=json.dumps(schema))
        case kind:
            raise invalid("response_format.type", f"{echo(repr(kind))} is not one of text, json_object, json_schema")


def _structured_outputs(body: Generation) -> Iterator[Constraint]:
    for name, value in (body.structured_outputs or {}).items():
        field = f"structured_outputs.{name}"
        if value is None or value is False or name in _ITS_OPTIONS:
            continue
        if name not in _VLLM:
            raise invalid(field, f"it is not supported; {', '.join(_VLLM)} are")
        yield field, _constraint(field, name, value)


def _guided(body: Generation) -> Iterator[Constraint]:
    """Yield what vLLM's clients asked for by older names."""
    for name in _VLLM:
        value = getattr(body, f"guided_{name}", None)
        if value is not None and value is not False:
            yield f"guided_{name}", _constraint(f"guided_{name}", name, value)


def _constraint(field: str, name: str, value: object) -> inference.StructuredOutput:
    match name, value:
        case "json", dict():
            return inference.StructuredOutput(json_schema=json.dumps(value))
        case "json", str():
            return inference.StructuredOutput(json_schema=value)
        case "json_object", True:
            return inference.StructuredOutput(json_object=True)
        case "regex", str():
            return inference.StructuredOutput(regex=value)
        case "grammar", str():
            return inference.StructuredOutput(grammar=value)
        case "choice", list() if all(isinstance(each, str) for each in value):
            return inference.StructuredOutput(choice=inference.Choices(texts=value))
        case _:
            raise invalid(field, f"{echo(repr(value))} is of the wrong type")
