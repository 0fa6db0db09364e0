"""Which tools an answer may call, and the grammar of an answer that has to call one, or match something else.

Invariant: arguments match their tool's parameters wherever an answer has a grammar. A tool whose parameters cannot be
compiled is the exception: its arguments are any JSON object, and the response names its parameters as ignored.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdserve.base.errors import echo
from pdserve.grammar.compiler import WHITESPACE
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Cause, RefusedError, invalid
from pdserve.protocol.sampling import StructuredOutput
from pdserve.router.frontend.openai.body import Object
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.prompts import Check
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls import ToolFormat

MAX_TOOLS = 128
MAX_FORCED_CALLS = 8  # of an answer that must call tools
NEWLINE = "\n"
Schema = Mapping[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # or anything that is escaped
_ANY: Schema = {"type": "object"}
_NONE: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_SAYING_NOTHING = frozenset({"$schema", "title", "description"})  # about what arguments a tool takes
_FORMS = "'none', 'auto', 'required', a function, or allowed_tools"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call."""

    name: str
    field: str  # of the request, with its parameters
    parameters: Schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may do with tools."""

    tools: tuple[Tool, ...]  # that it may call
    must_call: bool = False
    is_named: bool = False  # the request names the tool to call
    one_at_most: bool = False


def tool_use(body: ChatRequest) -> ToolUse | None:
    """Return how an answer may use tools, None if there are none; RefusedError(INVALID_ARGUMENT) names the field."""
    tools = tuple(_tool(each, place) for place, each in enumerate(body.tools or ()))
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} are over the limit of {MAX_TOOLS}")
    one_at_most = body.parallel_tool_calls is False
    match body.tool_choice:
        case None | "auto":
            return ToolUse(tools, one_at_most=one_at_most) if tools else None
        case "none":
            return None
        case "required":
            if not tools:
                raise invalid("tool_choice", "'required' goes with tools, and none are given")
            return ToolUse(tools, must_call=True, one_at_most=one_at_most)
        case {"type": "allowed_tools"} as choice:
            allowed, mode = _allowed(choice)
            for name in sorted(allowed):
                _chosen(tools, name)
            tools = tuple(tool for tool in tools if tool.name in allowed)
            return ToolUse(tools, must_call=mode == "required", one_at_most=one_at_most)
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            return ToolUse((_chosen(tools, name),), must_call=True, is_named=True, one_at_most=True)
        case other:
            raise invalid("tool_choice", f"{echo(repr(other))} is not one of {_FORMS}")


def offered(body: ChatRequest) -> list[Object] | None:
    """Return the tools that the model is told of; RefusedError(INVALID_ARGUMENT) names the field."""
    match body.tool_choice:
        case "none":
            return None
        case {"type": "allowed_tools"} as choice:
            allowed, _ = _allowed(choice)
            return [tool for tool in body.tools or () if _name_of(tool) in allowed]
        case _:
            return body.tools


def _tool(given: Object, place: int) -> Tool:
    name_of, function = f"tools[{place}]", given.get("function")
    if given.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid(name_of, "it is no function: type 'function' with a member of that name is needed")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        limits = "1 to 64 letters, digits, dots, dashes and underscores are needed"
        raise invalid(f"{name_of}.function.name", f"{echo(repr(name))}; {limits}")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{name_of}.function.parameters", f"{echo(repr(parameters))} is no JSON Schema")
    parameters = parameters or {}
    return Tool(name, f"{name_of}.function.parameters", _NONE if _takes_nothing(parameters) else parameters)


def _takes_nothing(parameters: Schema) -> bool:
    """Return whether a schema names no parameter, and does not say that there may be others."""
    said = {name: value for name, value in parameters.items() if name not in _SAYING_NOTHING}
    return all(value in (None, []) or value == _NONE.get(name) for name, value in said.items())


def _chosen(tools: tuple[Tool, ...], name: object) -> Tool:
    chosen = next((tool for tool in tools if tool.name == name), None)
    if chosen is None:
        raise invalid("tool_choice", f"{echo(repr(name))} is not one of the tools")
    return chosen


def _allowed(choice: object) -> tuple[set[str], str]:
    """Return the names of the tools that a choice allows, and its mode. OpenAI's API has two forms of it."""
    inner = choice.get("allowed_tools", choice) if isinstance(choice, dict) else None
    inner = inner if isinstance(inner, dict) else {}
    tools, mode = inner.get("tools"), inner.get("mode", "auto")
    names = [_name_of(tool) for tool in tools] if isinstance(tools, list) else []
    if not names or not all(names):
        raise invalid("tool_choice.allowed_tools.tools", "a list of functions with their names is needed")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.allowed_tools.mode", f"{echo(repr(mode))} is not one of 'auto', 'required'")
    return set(map(str, names)), mode


def _name_of(tool: object) -> str | None:
    """Return the name of a function, in the form of chats or of responses."""
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case _:
            return None


@dataclass(eq=False)
class ToolGrammar:
    """The grammar of answers that call tools, in the format of the model's family, or match what the request asks."""

    use: ToolUse
    written: ToolFormat
    tokenizer: Tokenizer
    otherwise: str | None = None  # a rule's body in Lark's notation: the answer that calls no tool; None: it has to
    ignored: list[str] = field(default_factory=list)  # fields

    def text(self) -> str:
        """Return the grammar in Lark's notation."""
        written, rules, calls = self.written, list[str](), list[str]()
        for number, tool in enumerate(self.use.tools):
            schema = _ANY if tool.field in self.ignored else tool.parameters
            rules += self._call(number, tool.name, schema)
            calls.append(f"call{number}")
        may_go_on = written.takes_several and not self.use.one_at_most
        begin, end = literal(written.begin, self.tokenizer), literal(written.end, self.tokenizer)
        if written.may_be_bare:
            answer = "call"
        elif written.is_list:
            answer = f'{begin} "[" call{_more(", ", "call", may_go_on)} "]"'
        else:
            answer = f"one{_more(NEWLINE, 'one', may_go_on)}"
            rules.append(f"one: {begin} {json.dumps(NEWLINE)} call {json.dumps(NEWLINE)} {end}")
        if self.otherwise is not None:
            answer, rules = f"{answer} | otherwise", [*rules, f"otherwise: {self.otherwise}"]
        return "\n".join([f"start: {answer}", f"call: {' | '.join(calls)}", *rules])

    def _call(self, number: int, name: str, schema: Schema) -> list[str]:
        key = self.written.arguments_key
        if self.written.may_be_bare:  # as JSON: llguidance would take a text that other JSON begins with for the call
            members = {"name": {"const": name}, key: _moved(schema, f"/properties/{key}")}
            whole = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
            return [f"call{number}: {json_rule(whole)}"]
        opening = f'{{"name": {json.dumps(name)}, "{key}": '
        arguments = json.dumps("{}") if schema is _NONE else json_rule(schema)
        return [f'call{number}: {json.dumps(opening)} args{number} "}}"', f"args{number}: {arguments}"]

    async def loosen(self, check: Check) -> StructuredOutput | None:
        """Ignore parameters that cannot be compiled; return the grammar without them, None if all can be.

        RefusedError(INVALID_ARGUMENT) names them if the request names their tool.
        """
        for tool in self.use.tools:
            if tool.parameters is _NONE:
                continue
            try:
                await check(StructuredOutput("json_schema", (json.dumps(tool.parameters),)))
            except RefusedError as error:
                if error.refused.cause is not Cause.INVALID:
                    raise
                if self.use.is_named:
                    raise invalid(tool.field, error.refused.message.partition(": ")[2]) from error
                self.ignored.append(tool.field)
        return StructuredOutput("grammar", (self.text(),)) if self.ignored else None


def json_rule(schema: Schema) -> str:
    """Return a rule's body for JSON that matches a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def rule_of(wanted: inference.StructuredOutput) -> str | None:
    """Return a rule's body for a constraint; None for a schema that is no JSON object."""
    match wanted.WhichOneof("format"):
        case "json_object":
            return json_rule(_ANY)
        case "json_schema":
            try:
                schema = json.loads(wanted.json_schema)
            except (ValueError, RecursionError):
                return None
            return json_rule(schema) if isinstance(schema, dict) else None
        case "regex":
            return f"/{_SLASH.sub(_escaped, wanted.regex)}/"
        case "choice":
            return " | ".join(map(json.dumps, wanted.choice.texts))
        case _:
            return f"%lark {{\n{wanted.grammar}\n}}"


def _escaped(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _moved(part: Any, below: str) -> Any:  # noqa: ANN401 - JSON
    """Return a schema whose references lead into itself where it is no longer the root, but below one."""
    if isinstance(part, list):
        return [_moved(each, below) for each in part]
    if not isinstance(part, Mapping):
        return part
    moved = {name: _moved(value, below) for name, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{below}{reference[1:]}"
    return moved


def _more(separator: str, rule: str, may_go_on: bool) -> str:
    return f" ({json.dumps(separator)} {rule}){{0,{MAX_FORCED_CALLS - 1}}}" if may_go_on else ""


def has_special(marker: str, tokenizer: Tokenizer) -> bool:
    """Return whether a marker is a special token, which texts leave out."""
    token_id = tokenizer.token_id(marker) if marker else None
    return token_id is not None and not tokenizer.decode([token_id])


def literal(marker: str, tokenizer: Tokenizer) -> str:
    return f"<[{tokenizer.token_id(marker)}]>" if has_special(marker, tokenizer) else json.dumps(marker)


def arguments_of(text: str) -> Object | None:
    """Return the arguments of a call; None unless they are a whole JSON object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None
