"""Items of conversations: what clients send and get, what is stored, and the messages of a chat that they make."""

import secrets
from collections.abc import Iterable, Iterator, Sequence

from pdserve.base.errors import echo
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.openai.body import Body, Object
from pdserve.router.frontend.responses.tools import joined

REFERENCE = "item_reference"
MAX_ID_CHARS = 128
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ASKING = ("user", "system", "developer")  # roles
_SERVED = f"{', '.join(_PREFIXES)} and {REFERENCE}"


class ItemPart(Body):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Body):
    """One item of a conversation."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    status: str | None = None

    @property
    def is_reference(self) -> bool:
        return self.type == REFERENCE or (self.type is None and self.role is None and self.id is not None)


def new_id(kind: str) -> str:
    """Return a name for an item of a kind."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"


def stored(given: str | Sequence[Item] | None, field: str = "input") -> list[Item]:
    """Return items as they are stored: with ids, and content in parts. RefusedError names what is not served."""
    if isinstance(given, str):
        given = [Item(role="user", content=given)]
    return [_stored(item, f"{field}[{place}]") for place, item in enumerate(given or ())]


def _stored(item: Item, where: str) -> Item:
    if item.is_reference:
        if not item.id:
            raise invalid(f"{where}.id", "a reference names an item")
        return item
    kind = item.type or "message"
    if kind not in _PREFIXES:
        raise invalid(f"{where}.type", f"{echo(kind, repr)} is not served; {_SERVED} are")
    changes: Object = {"type": kind, "id": item.id or new_id(kind), "status": item.status or "completed"}
    if len(changes["id"]) > MAX_ID_CHARS:
        raise invalid(f"{where}.id", f"{len(item.id or '')} characters are over the limit of {MAX_ID_CHARS}")
    if kind == "message" and isinstance(item.content, str):
        part: Object = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": []}
        changes["content"] = [ItemPart.model_validate(part)]
    whole = item.model_copy(update=changes)
    _check(whole, where)
    return whole


def _check(item: Item, where: str) -> None:
    """Raise RefusedError where an item lacks what its type needs, or has what is not served."""
    match item:
        case Item(type="message", role="assistant", content=list()):
            text_of(item.content, f"{where}.content", ("output_text", "refusal"))
        case Item(type="message", role="user" | "system" | "developer", content=list()):
            text_of(item.content, f"{where}.content", ("input_text",))
        case Item(type="message", role=role) if role not in (*_ASKING, "assistant"):
            raise invalid(f"{where}.role", f"{echo(repr(role))} is not one of assistant, {', '.join(_ASKING)}")
        case Item(type="message"):
            raise invalid(f"{where}.content", "a text or parts are needed")
        case Item(type="function_call", call_id=str(), name=str(), arguments=str()):
            pass
        case Item(type="function_call"):
            raise invalid(where, "a function_call has call_id, name and arguments")
        case Item(type="function_call_output", call_id=str(), output=str() | list()):
            text_of(item.output, f"{where}.output", ("input_text", "output_text"))
        case Item(type="function_call_output"):
            raise invalid(where, "a function_call_output has call_id and output")
        case _:
            text_of(item.content, f"{where}.content", ("reasoning_text",))
            text_of(item.summary, f"{where}.summary", ("summary_text",))


def text_of(content: str | Sequence[ItemPart] | None, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a content with parts of some kinds; RefusedError names the first of another kind."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in kinds or text is None:
            served = " and ".join(kinds)
            raise invalid(f"{where}[{place}]", f"a part of type {echo(part.type, repr)} is not served; {served} is")
        texts.append(text)
    return "\n".join(texts)


def messages_of(context: Sequence[Item], given: Sequence[Item]) -> Iterator[Object]:
    """Yield the messages of a chat: an assistant's reasoning, text and calls are one message.

    RefusedError names an item of `given` that answers no call.
    """
    calls = {item.call_id for item in (*context, *given) if item.type == "function_call"}
    for place, item in enumerate(given):
        if item.type == "function_call_output" and item.call_id not in calls:
            shown = echo(repr(item.call_id))
            raise invalid(f"input[{place}].call_id", f"{shown} is of no function_call in this conversation")
    turn = _Turn()
    for item in (*context, *given):
        if item.type in ("reasoning", "function_call") or item.role == "assistant":
            yield from turn.add(item)
            continue
        yield from turn.end()
        if item.type == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _plain(item.output)}
        else:
            yield {"role": item.role, "content": _plain(item.content)}
    yield from turn.end()


class _Turn:
    """An assistant's message that goes on."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[Object] = []

    def add(self, item: Item) -> Iterator[Object]:
        """Add an item; yield the message before it if it begins another one."""
        match item.type:
            case "reasoning":
                if self._text is not None or self._calls:
                    yield from self.end()
                self._thoughts.append(_plain(item.content) or _plain(item.summary))
            case "function_call":
                function = {"name": joined(item.namespace, item.name or ""), "arguments": item.arguments}
                self._calls.append({"id": item.call_id, "type": "function", "function": function})
            case _:
                if self._text is not None or self._calls:
                    yield from self.end()
                self._text = _plain(item.content)

    def end(self) -> Iterator[Object]:
        if self._text is not None or self._calls:
            yield {
                "role": "assistant",
                "content": self._text,
                "reasoning_content": "\n".join(self._thoughts) or None,
                "tool_calls": self._calls or None,
            }
        self._thoughts, self._text, self._calls = [], None, []


def _plain(content: str | Sequence[ItemPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.refusal or part.text or "" for part in content)


def dumped(items: Iterable[Item]) -> list[Object]:
    return [item.model_dump(exclude_none=True) for item in items]
