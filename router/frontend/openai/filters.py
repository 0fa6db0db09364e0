"""Structured output, tool calls and reasoning: what constrains an answer, and how its text is split into parts.

`plan` checks a request's tools and constraints, writes into the request what the answer must match, and returns how the
text is filtered. A filter belongs to one choice of one response. Deltas are as in OpenAI's chunks: `{"content": ...}`,
`{"reasoning_content": ...}`, `{"tool_calls": [{"index": 0, ...}]}`.
"""

import json
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.base.errors import echo
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Refused, invalid
from pdserve.router.frontend.openai.fields import ChatRequest, Generation
from pdserve.router.frontend.openai.tools import ToolGrammar, ToolUse, has_special, rule_of, tool_use
from pdserve.router.frontend.served import ServedModel
from pdserve.text.chat import ChatTemplate
from pdserve.text.reasoning import ReasoningParser, split_at
from pdserve.text.tool_calls import Arguments, CallBegun, Content, Event, ToolCallParser, ToolFormat

Constraint = tuple[str, inference.StructuredOutput]  # the field that asks for it, and the constraint
_VLLM = ("json", "json_object", "regex", "choice", "grammar")
_ITS_OPTIONS = frozenset({"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend"})


def constraint_of(body: Generation) -> Constraint | None:
    """Return what the answer must match; RefusedError(INVALID_ARGUMENT) if fields contradict each other."""
    found = [*_response_format(body), *_structured_outputs(body)]
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
    """Yield constraints from vLLM's fields, the older ones too."""
    given = [(f"structured_outputs.{name}", name, value) for name, value in (body.structured_outputs or {}).items()]
    given += [(f"guided_{name}", name, getattr(body, f"guided_{name}")) for name in _VLLM]
    for field, name, value in given:
        if value is None or value is False or name in _ITS_OPTIONS:
            continue
        if name not in _VLLM:
            raise invalid(field, f"it is not supported; {', '.join(_VLLM)} are")
        yield field, _constraint(field, name, value)


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


Delta = dict[str, Any]
_ID_CHARS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # the only length that Mistral's templates accept


@dataclass(frozen=True, slots=True)
class Plan:
    """How an answer is constrained and filtered."""

    new_filter: "Callable[[], MessageFilter] | None" = None  # for each choice; None: text is content
    constrained_by: str = ""  # the field that says what the answer must match
    grammar: ToolGrammar | None = None  # where tools may be called and the answer has to match something
    begins_inside: bool | None = None  # whether the prompt has begun the reasoning; None: the text has no reasoning
    template: ChatTemplate | None = None  # of the prompt, where it is neither the model's nor a text

    def renamed(self, refused: Refused) -> Refused:
        """Return a refusal with the names of the fields that asked for what it is about."""
        about, _, problem = refused.message.partition(": ")
        if self.constrained_by and about.startswith("structured_output"):
            return replace(refused, message=f"{self.constrained_by}: {problem}")
        if self.template is not None and about == "chat":
            return replace(refused, message=f"prompt: {problem}")
        return refused


def plan(body: Generation, request: inference.GenerateRequest, model: ServedModel) -> Plan:
    """Write what constrains the output into `request`; RefusedError(INVALID_ARGUMENT) names the field refused."""
    field, wanted = constraint_of(body) or ("", None)
    use = tool_use(body) if isinstance(body, ChatRequest) else None
    written, tokenizer = model.tool_format, model.tokenizer
    grammar = None
    if use is not None and use.must_call:  # whatever else the answer was to match
        field, grammar = "tools", ToolGrammar(use, written, tokenizer)
    elif use is not None and wanted is not None and (rule := rule_of(wanted)) is not None:
        grammar = ToolGrammar(use, written, tokenizer, rule)
    if grammar is not None:
        wanted = inference.StructuredOutput(grammar=grammar.text())
    if wanted is not None:
        request.sampling.structured_output.CopyFrom(wanted)
    ends: list[str] = []
    if use is not None and any(has_special(marker, tokenizer) for marker in (written.begin, written.end)):
        request.sampling.skip_special_tokens = False
        ends = [tokenizer.piece(token_id).decode(errors="replace") for token_id in model.eos_token_ids]
    begins_inside = None
    if isinstance(body, ChatRequest) and wanted is None and model.reasoning is not None:
        begins_answer = body.add_generation_prompt is not False and not body.continue_final_message
        begins_inside = begins_answer and model.reasoning.begins_inside(body.chat_template_kwargs or {})
    if use is None and begins_inside is None:
        return Plan(None, field)
    shows_reasoning = not (isinstance(body, ChatRequest) and body.include_reasoning is False)

    def new_filter() -> MessageFilter:
        return MessageFilter(use, written, ends, begins_inside, shows_reasoning=shows_reasoning)

    return Plan(new_filter, field, grammar, begins_inside)


class MessageFilter:
    """Turns the text of one choice into deltas: content, tool calls and reasoning."""

    def __init__(
        self,
        use: ToolUse | None,
        written: ToolFormat,
        ends: Sequence[str],
        begins_inside: bool | None,
        *,
        shows_reasoning: bool,
    ) -> None:
        """`use`: of tools; None: the text has no tool calls. `written`: how a tool call is written.

        `ends`: the text of special tokens of which one may end the answer; empty: texts leave them out.
        `begins_inside`: whether the prompt has begun the reasoning; None: the text has no reasoning.
        """
        self._use = use
        self._calls = None if use is None else ToolCallParser(written, frozenset(tool.name for tool in use.tools))
        self._ends = ends
        self._held = ""  # text that may become one of `ends`
        self._reasoning = None if begins_inside is None else ReasoningParser(begins_inside=begins_inside)
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0
        self._has_content = False

    @property
    def may_call(self) -> bool:
        """Whether the message may be calls alone, without content."""
        return self._use is not None

    def push(self, text: str) -> list[Delta]:
        """Take the text gained; return what the message gains by it."""
        if self._ends:
            text = self._before_end(self._held + text)
        if self._reasoning is None:
            return self._answer(text)
        return [delta for part in self._reasoning.push(text) for delta in self._part(part.text, part.is_reasoning)]

    def finish(self, finish_reason: str) -> tuple[list[Delta], str]:
        """End the text; return what was held back, and the finish reason to report."""
        deltas: list[Delta] = []
        if self._reasoning is not None:
            for part in self._reasoning.finish():
                deltas += self._part(part.text, part.is_reasoning)
        deltas += self._answer(self._held)
        if self._calls is None or self._use is None:
            return deltas, finish_reason
        is_cut = self._calls.is_within_call and not self._is_left_out
        deltas += [delta for event in self._calls.finish() for delta in self._delta(event)]
        if not (self._num_calls or self._has_content):
            deltas.append({"content": ""})
        called = self._num_calls > 0 and not self._use.is_named and not is_cut
        return deltas, "tool_calls" if called and finish_reason == "stop" else finish_reason

    def _before_end(self, text: str) -> str:
        """Return the text without the token that ends it, and without what may become that."""
        found = [split_at(text, end) for end in self._ends]
        ended = [before for before, _, has_ended in found if has_ended]
        self._held = "" if ended else max((rest for _, rest, _ in found), key=len)
        return min(ended, key=len) if ended else text.removesuffix(self._held)

    def _part(self, text: str, is_reasoning: bool) -> list[Delta]:
        if not is_reasoning:
            return self._answer(text)
        return [{"reasoning_content": text}] if self._shows_reasoning else []

    def _answer(self, text: str) -> list[Delta]:
        if self._calls is None:
            return [{"content": text}] if text else []
        return [delta for event in self._calls.push(text) for delta in self._delta(event)]

    @property
    def _is_left_out(self) -> bool:
        """Whether the last call is one more than the answer may have."""
        return self._num_calls > 1 and self._use is not None and self._use.one_at_most

    def _delta(self, event: Event) -> list[Delta]:
        if isinstance(event, Content):
            self._has_content = True
            return [{"content": event.text}]
        if isinstance(event, CallBegun):
            self._num_calls += 1
        if self._is_left_out:
            return []
        index = self._num_calls - 1
        if isinstance(event, Arguments):
            return [{"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}]
        call_id = "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))
        function = {"name": event.name, "arguments": ""}
        return [{"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}]
