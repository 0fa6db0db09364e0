"""Tools that a conversation may, or has to, call."""

import json
import re
from dataclasses import dataclass
from typing import Any

from pdserve.errors import echo, invalid
from pdserve.grammar.compiler import WHITESPACE
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.prompts import Tokenizer
from pdserve.text.parsers.tool_calls import ToolFormat

MAX_TOOLS = 128
MAX_FORCED_CALLS = 8  # of an answer that has to call tools
NEWLINE = "\n"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may do with tools."""

    forced: tuple[Tool, ...] = ()  # it has to call one of these; none: it may call any
    is_named: bool = False  # the request names the one
    one_at_most: bool = False


def tool_use(body: ChatRequest) -> ToolUse | None:
    """Return how tools are to be used, None where they are not; RequestError(INVALID_ARGUMENT) names what is wrong."""
    tools = [_tool(each, place) for place, each in enumerate(body.tools or ())]
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} are over the limit of {MAX_TOOLS}")
    one_at_most = body.parallel_tool_calls is False
    match body.tool_choice:
        case None | "auto":
            return ToolUse(one_at_most=one_at_most) if tools else None
        case "none":
            return None
        case "required" if tools:
            return ToolUse(tuple(tools), one_at_most=one_at_most)
        case "required":
            raise invalid("tool_choice", "'required' goes with tools, and none are given")
        case {"type": "function", "function": {"name": name}}:
            chosen = tuple(tool for tool in tools if tool.name == name)
            if not chosen:
                raise invalid("tool_choice", f"{echo(repr(name))} is not one of the tools")
            return ToolUse(chosen[:1], is_named=True, one_at_most=True)
        case other:
            known = "'none', 'auto', 'required', or a function"
            raise invalid("tool_choice", f"{echo(repr(other))} is not one of {known}")


def forced_calls(use: ToolUse, written: ToolFormat, tokenizer: Tokenizer) -> inference.StructuredOutput:
    """Return what an answer matches that calls tools and does nothing else, in the way of the model's family."""
    rules, calls = [], []
    for number, tool in enumerate(use.forced):
        opening = f'{{"name": {json.dumps(tool.name)}, "{written.arguments_key}": '
        schema = {**tool.parameters, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        rules.append(f'call{number}: {json.dumps(opening)} args{number} "}}"')
        rules.append(f"args{number}: %json {json.dumps(schema)}")
        calls.append(f"call{number}")
    may_go_on = written.takes_several and not use.one_at_most
    begin, end = _literal(written.begin, tokenizer), _literal(written.end, tokenizer)
    if written.may_be_bare:
        start = "call"
    elif written.is_list:
        start = f'{begin} "[" call{_more(", ", "call", may_go_on)} "]"'
    else:
        start = f"one{_more(NEWLINE, 'one', may_go_on)}"
        rules.append(f"one: {begin} {json.dumps(NEWLINE)} call {json.dumps(NEWLINE)} {end}")
    return inference.StructuredOutput(grammar="\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *rules]))


def _more(separator: str, rule: str, may_go_on: bool) -> str:
    return f" ({json.dumps(separator)} {rule}){{0,{MAX_FORCED_CALLS - 1}}}" if may_go_on else ""


def has_special(marker: str, tokenizer: Tokenizer) -> bool:
    """Return whether a marker is a token that texts leave out."""
    token_id = tokenizer.token_id(marker) if marker else None
    return token_id is not None and not tokenizer.decode([token_id])


def _literal(marker: str, tokenizer: Tokenizer) -> str:
    return f"<[{tokenizer.token_id(marker)}]>" if has_special(marker, tokenizer) else json.dumps(marker)


def _tool(given: dict[str, Any], place: int) -> Tool:
    field, function = f"tools[{place}]", given.get("function")
    if given.get("type", "function") != "function" or not isinstance(function, dict):
        raise invalid(field, "it is no function: type 'function' with a member of that name is needed")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        limits = "1 to 64 letters, digits, dots, dashes and underscores are needed"
        raise invalid(f"{field}.function.name", f"{echo(repr(name))}; {limits}")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{field}.function.parameters", f"{echo(repr(parameters))} is no JSON Schema")
    return Tool(name, parameters or _ANY_ARGUMENTS)
