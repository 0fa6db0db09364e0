"""Tools as this API has them, and the functions of a chat that they are.

A namespace groups functions. In the chat, a function of a namespace has both names, joined: the model calls it by that
name, and its call comes back in two parts. Invariant: no two functions have one joined name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdserve.base.errors import echo
from pdserve.protocol.refusal import Refused, invalid
from pdserve.router.frontend.openai.body import Object

MAX_OF_NAMESPACE = 1024  # functions
HOSTED = {
    **dict.fromkeys(("web_search", "web_search_preview", "file_search"), "nothing is searched here"),
    **dict.fromkeys(("code_interpreter", "shell", "local_shell", "programmatic_tool_calling"), "no code is run here"),
    **dict.fromkeys(("computer", "computer_use_preview"), "no computer is used here"),
    "mcp": "no other server is called from here",
    "image_generation": "answers are text",
    "custom": "a call's arguments are JSON, never free text",
    **dict.fromkeys(("apply_patch", "tool_search"), "answers call functions alone"),
    "namespace": "one has functions alone",
}
"""Why a kind of tool is not served."""
_FIELDS = ("name", "description", "parameters", "strict")
_PLACE = re.compile(r"tools\[(\d+)\]")


def joined(namespace: str | None, name: str) -> str:
    """Return a function's name in a chat."""
    return f"{namespace}__{name}" if namespace else name


def functions_of(tools: Sequence[Object] | None) -> list[Object]:
    """Return the tools of a chat; RefusedError names the first that is none."""
    return [
        {"type": "function", "function": {**_told(tool), "name": joined(namespace, name)} if name else _told(tool)}
        for _, namespace, name, tool in _functions(tools)
    ]


def namespaces_of(tools: Sequence[Object] | None) -> Mapping[str, Object]:
    """Return the functions that a namespace has, by their names in a chat: what an item says of each."""
    return {
        joined(namespace, name): {"namespace": namespace, "name": name}
        for _, namespace, name, _ in _functions(tools)
        if namespace
    }


def chosen(choice: str | Object | None) -> str | Object | None:
    """Return which tool a chat is to call; RefusedError for tools that are not served."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if isinstance(kind, str) and kind in HOSTED:
        raise invalid("tool_choice", f"tools of type {kind!r} are not served: {HOSTED[kind]}")
    if isinstance(allowed := choice.get("tools"), list):
        return {**choice, "tools": [_by_joined_name(each) for each in allowed]}
    whole: Object = _by_joined_name(choice)
    return whole


def _by_joined_name(tool: object) -> Any:  # noqa: ANN401 - whatever was sent
    if isinstance(tool, dict) and isinstance(namespace := tool.get("namespace"), str):
        return {**tool, "name": joined(namespace, _name(tool))}
    return tool


def placed(refused: Refused, tools: Sequence[Object] | None) -> Refused:
    """Return a refusal of a chat that names a tool by its place in the request."""
    found = _PLACE.match(refused.message)
    fields = [field for field, *_ in _functions(tools)] if found else []
    if found is None or int(found[1]) >= len(fields):
        return refused
    return replace(refused, message=fields[int(found[1])] + refused.message[found.end() :])


def _functions(tools: Sequence[Object] | None) -> Iterator[tuple[str, str, str, Object]]:
    """Yield the place of each function, its namespace, if it has one, and its name. Chats check what names may be."""
    taken, grouped = set[str](), set[str]()  # joined names, and those of namespaces
    for field, namespace, name, tool in _placed(tools):
        whole = joined(namespace, name)
        if whole in grouped or (namespace and whole in taken):
            raise invalid(f"{field}.name", f"{echo(repr(whole))}, with the namespace, is another function's name")
        taken.add(whole)
        grouped |= {whole} if namespace else set()
        yield field, namespace, name, tool


def _placed(tools: Sequence[Object] | None) -> Iterator[tuple[str, str, str, Object]]:
    for place, tool in enumerate(tools or ()):
        field = f"tools[{place}]"
        if tool.get("type") != "namespace":
            _check(tool, field)
            yield field, "", _name(tool), tool
            continue
        namespace, inner = _name(tool), tool.get("tools")
        if not namespace or not isinstance(inner, list) or len(inner) > MAX_OF_NAMESPACE:
            raise invalid(field, f"a namespace has a name, and up to {MAX_OF_NAMESPACE} tools")
        for index, each in enumerate(inner):
            within = f"{field}.tools[{index}]"
            if not isinstance(each, dict):
                raise invalid(within, f"{echo(repr(each))} is no tool")
            _check(each, within)
            yield within, namespace, _name(each), each


def _name(tool: Object) -> str:
    name = tool.get("name")
    return name if isinstance(name, str) else ""


def _check(tool: Object, field: str) -> None:
    kind = tool.get("type", "function")
    if kind != "function":
        why = HOSTED.get(kind) if isinstance(kind, str) else None
        raise invalid(f"{field}.type", f"{echo(repr(kind))} is not served: {why or 'it is not known'}; 'function' is")


def _told(tool: Object) -> Object:
    return {name: tool[name] for name in _FIELDS if tool.get(name) is not None}
