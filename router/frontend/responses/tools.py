"""Tools as this API has them, and the functions of a chat that they are.

A namespace groups functions. In the chat, a function of a namespace has both names, joined: the model calls it by that
name, and its call comes back in two parts.
"""

from collections.abc import Iterator, Mapping, Sequence

from pdserve.base.errors import echo
from pdserve.protocol.refusal import invalid
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
}
"""Why a kind of tool is not served."""
_FIELDS = ("name", "description", "parameters", "strict")


def joined(namespace: str | None, name: str) -> str:
    """Return a function's name in a chat."""
    return f"{namespace}__{name}" if namespace else name


def functions_of(tools: Sequence[Object] | None) -> list[Object]:
    """Return the tools of a chat; RefusedError names the first that is none."""
    return [
        {"type": "function", "function": {**_told(tool), "name": joined(namespace, name)} if name else _told(tool)}
        for namespace, name, tool in _functions(tools)
    ]


def namespaces_of(tools: Sequence[Object] | None) -> Mapping[str, Object]:
    """Return the functions that a namespace has, by their names in a chat: what an item says of each."""
    return {
        joined(namespace, name): {"namespace": namespace, "name": name}
        for namespace, name, _ in _functions(tools)
        if namespace
    }


def _functions(tools: Sequence[Object] | None) -> Iterator[tuple[str, str, Object]]:
    """Yield each function with its namespace, if it has one, and its name. Chats check the names."""
    for place, tool in enumerate(tools or ()):
        field = f"tools[{place}]"
        if tool.get("type") != "namespace":
            _check(tool, field)
            yield "", _name(tool), tool
            continue
        namespace, inner = _name(tool), tool.get("tools")
        if not namespace or not isinstance(inner, list) or len(inner) > MAX_OF_NAMESPACE:
            raise invalid(field, f"a namespace has a name, and up to {MAX_OF_NAMESPACE} tools")
        for index, each in enumerate(inner):
            within = f"{field}.tools[{index}]"
            if not isinstance(each, dict):
                raise invalid(within, f"{echo(repr(each))} is no tool")
            _check(each, within)
            yield namespace, _name(each), each


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
