"""How a chat template takes calls of tools from earlier in a conversation.

Templates differ. Some join a message's content to other text, so it has to be a string; others show calls only where
the content is none. Some write a call's arguments as JSON, so they have to be an object; others join them to text. So a
template is tried with a call when it is loaded, in each form, and the first form that shows the call is used.

Invariant: a template that takes some form of a call takes every call, whatever text its arguments are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from pdserve.protocol.refusal import RefusedError

Message = dict[str, object]
Content = Literal["empty", "none", "absent"]
Render = Callable[[Sequence[Message]], str]  # RefusedError where the template refuses the messages
WRAPPED = "arguments"  # the key of arguments that are no object, for a template that takes nothing else


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template takes an assistant's message with calls."""

    content: Content = "empty"  # where the message has no content
    are_objects: bool = True  # arguments; otherwise they are JSON text
    takes_text: bool = True  # arguments that are no object stay the text that they are; otherwise they are wrapped
    names_tools: bool = False  # a tool's answer has the name of the tool, which clients of OpenAI's API leave out

    def shaped(self, messages: Sequence[Message]) -> list[Message]:
        names: dict[object, object] = {}
        shaped = []
        for message in messages:
            calls = [self._call(call) for call in _listed(message.get("tool_calls"))]
            names |= {call.get("id"): function["name"] for call in calls if "name" in (function := _function(call))}
            if calls:
                message = self._with_content(message) | {"tool_calls": calls}  # noqa: PLW2901 - in its form
            elif self.names_tools and message.get("tool_call_id") in names:
                message = {"name": names[message["tool_call_id"]], **message}  # noqa: PLW2901
            shaped.append(message)
        return shaped

    def _with_content(self, message: Message) -> Message:
        if message.get("content"):
            return message
        without = {name: value for name, value in message.items() if name != "content"}
        return without if self.content == "absent" else {**without, "content": "" if self.content == "empty" else None}

    def _call(self, call: Message) -> Message:
        function = _function(call)
        if not function:
            return call
        arguments = self._arguments(function.get("arguments"))
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, given: object) -> object:
        """Return arguments in this form: {} for none, and for null."""
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if text.strip() in ("", "null"):
            text = "{}"
        if not self.are_objects:
            return text
        value = _object(text)
        if value is not None:
            return value
        return text if self.takes_text else {WRAPPED: text}


def form_of(render: Render) -> CallForm:
    """Return the form in which a template shows a call; the default where it shows or takes none."""
    contents: tuple[Content, ...] = ("empty", "none", "absent")
    forms = [CallForm(*each) for each in product(contents, (True, False), (True,), (False, True))]
    ranks = {form: _rank(render, form, _ARGUMENTS) for form in forms}
    best = max(forms, key=lambda form: ranks[form])  # the first of the best
    return replace(best, takes_text=_rank(render, best, _TEXT) >= ranks[best])


_TOOL, _VALUE, _ID = "lookup", "Winterthur", "abcdefghi"  # Mistral's templates take ids of nine characters alone
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "a town"}}}
TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "looks up", "parameters": _PARAMETERS}}]
_ARGUMENTS = {"place": _VALUE}
_TEXT = f"place: {_VALUE}"


def _rank(render: Render, form: CallForm, arguments: Mapping[str, str] | str) -> int:
    """Return how well a template shows a call in a form: 0 where it refuses it, 3 where it shows all of it."""
    call: Message = {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    tried: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "!", "tool_call_id": _ID},
    ]
    try:
        shown = render(form.shaped(tried))
    except RefusedError:
        return 0
    if _VALUE not in shown:
        return 1
    return 2 if repr(arguments) in shown else 3  # Python's notation is no JSON


def _object(text: str) -> dict[str, object] | None:
    """Return the JSON object that a text is; None if it is none, or holds half of a surrogate pair."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
        return value if isinstance(value, dict) else None
    return None


def _listed(calls: object) -> list[Message]:
    return calls if isinstance(calls, list) else []


def _function(call: Message) -> Message:
    function = call.get("function")
    return function if isinstance(function, dict) else {}
