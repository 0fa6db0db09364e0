"""The order of a response's events, and the items that they make. Pure: deltas in, events out.

Invariant: `response.created`, `response.queued` if it waits, `response.in_progress`; for each item, one after the
other, that it is added, its content and that it is done; then one of `response.completed`, `.incomplete` and `.failed`,
and nothing after it. Sequence numbers count from 0 without a gap. An item that is done has the text of its deltas.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from pdserve.base.errors import InvariantError
from pdserve.router.frontend.openai.filters import Delta
from pdserve.router.frontend.openai.tools import arguments_of
from pdserve.router.frontend.responses.items import new_id

Json = dict[str, Any]


class State(Enum):
    """How far a response is."""

    NEW = auto()
    QUEUED = auto()
    BETWEEN = auto()  # no item goes on
    MESSAGE = auto()
    REASONING = auto()
    CALL = auto()
    ENDED = auto()


_TEXTS = {"reasoning_content": State.REASONING, "content": State.MESSAGE}  # of deltas, and what goes on with them
_EVENTS = {
    State.MESSAGE: "response.output_text",
    State.REASONING: "response.reasoning_text",
    State.CALL: "response.function_call_arguments",
}


class Output:
    """What a response has put out so far."""

    def __init__(self, namespaces: Mapping[str, Json] = MappingProxyType({})) -> None:
        """`namespaces`: what an item says of a function that has one, by the name in a call."""
        self._namespaces = namespaces
        self.items: list[Json] = []
        self.num_reasoning = 0  # items
        self._state = State.NEW
        self._num_events = 0
        self._texts: list[str] = []  # of the item that goes on
        self._logprobs: list[Json] = []  # likewise
        self._unsent: list[Json] = []  # log probabilities whose text has not come yet

    @property
    def is_told(self) -> bool:
        """Whether an event was returned."""
        return self._state is not State.NEW

    @property
    def is_begun(self) -> bool:
        return self._state not in (State.NEW, State.QUEUED)

    def queue(self, response: Json) -> list[Json]:
        """Return the first events of a response that waits. `response` is shown as it is now."""
        if self._state is not State.NEW:
            raise InvariantError(f"a response is queued while {self._state.name}")
        self._state = State.QUEUED
        return [self._event(f"response.{name}", response=response) for name in ("created", "queued")]

    def begin(self, response: Json) -> list[Json]:
        """Return the events of a response whose answer begins."""
        names = ("created", "in_progress") if self._state is State.NEW else ("in_progress",)
        if self.is_begun:
            raise InvariantError(f"a response begins while {self._state.name}")
        self._state = State.BETWEEN
        return [self._event(f"response.{name}", response=response) for name in names]

    def add(self, delta: Delta, logprobs: Sequence[Json] = ()) -> list[Json]:
        """Take what a message gained, and log probabilities of its tokens."""
        if self._state in (State.NEW, State.QUEUED, State.ENDED):
            raise InvariantError(f"a response gains while {self._state.name}")
        self._unsent += logprobs
        events: list[Json] = []
        for name, state in _TEXTS.items():
            text = delta.get(name)
            if text or (text is not None and not self.items):  # an answer without text is a message all the same
                events += self._open(state)
                events += self._gain(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._open(State.CALL, call)
            events += self._gain(call["function"].get("arguments"))
        return events

    def extend(self, text: str) -> tuple[int, str, int] | None:
        """Take text of the message that goes on: return its event's number, the item's id and place.

        None, and nothing is taken, where no message goes on. Most events are such, so writers need no JSON of theirs.
        """
        if self._state is not State.MESSAGE or self._unsent:
            return None
        self._texts.append(text)
        number, self._num_events = self._num_events, self._num_events + 1
        return number, self.items[-1]["id"], len(self.items) - 1

    def close(self, *, is_cut: bool) -> list[Json]:
        """End the item that goes on, if one does. `is_cut`: it is not whole."""
        if self._state not in _EVENTS:
            return []
        state, text, item = self._state, "".join(self._texts), self.items[-1]
        self._state, self._texts = State.BETWEEN, []
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if state is State.CALL:
            item |= {"arguments": text, "status": _status(is_cut=is_cut or arguments_of(text) is None)}
            done = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
            return [done, self._done(item)]
        part, shown = _part(state, text), {}
        if state is State.MESSAGE:
            shown = {"logprobs": self._logprobs + self._unsent}
            part |= shown
            self._logprobs, self._unsent = [], []
        item |= {"content": [part], "status": _status(is_cut=is_cut)}
        place["content_index"] = 0
        return [
            self._event(f"{_EVENTS[state]}.done", **place, text=text, **shown),
            self._event("response.content_part.done", **place, part=part),
            self._done(item),
        ]

    def end(self, kind: str, response: Json) -> Json:
        """Return the last event: `completed`, `incomplete` or `failed`."""
        if self._state is not State.BETWEEN and not (self._state is State.QUEUED and kind == "failed"):
            raise InvariantError(f"a response ends while {self._state.name}")
        self._state = State.ENDED
        return self._event(f"response.{kind}", response=response)

    def error(self, **told: object) -> Json:
        """Return the event of a stream that ends before the response has begun."""
        if self._state is not State.NEW:
            raise InvariantError(f"a response has no place for an error while {self._state.name}")
        self._state = State.ENDED
        return self._event("error", **told)

    def _open(self, state: State, call: Json | None = None) -> list[Json]:
        if self._state is state and call is None:
            return []
        events = self.close(is_cut=False)
        self._state = state
        item, part = self._begun(state, call), None if state is State.CALL else _part(state, "")
        self.items.append(item)
        self.num_reasoning += state is State.REASONING
        place = {"output_index": len(self.items) - 1}
        events.append(self._event("response.output_item.added", **place, item=dict(item)))
        if part is not None:
            place |= {"item_id": item["id"], "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=part))
        return events

    def _begun(self, state: State, call: Json | None) -> Json:
        if call is not None:
            name = call["function"]["name"]
            about = {"call_id": call["id"], **self._namespaces.get(name, {"name": name}), "arguments": ""}
            return {**_named("function_call"), **about}
        if state is State.MESSAGE:
            return {**_named("message"), "role": "assistant", "content": []}
        return {**_named("reasoning"), "summary": [], "content": []}

    def _gain(self, text: str | None) -> list[Json]:
        if not text:
            return []
        self._texts.append(text)
        place: Json = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._state is not State.CALL:
            place["content_index"] = 0
        if self._state is State.MESSAGE:
            place["logprobs"] = self._unsent
            self._logprobs, self._unsent = self._logprobs + self._unsent, []
        return [self._event(f"{_EVENTS[self._state]}.delta", **place, delta=text)]

    def _done(self, item: Json) -> Json:
        return self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _event(self, kind: str, **told: object) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **told}


def _status(*, is_cut: bool) -> str:
    return "incomplete" if is_cut else "completed"


def _named(kind: str) -> Json:
    return {"id": new_id(kind), "type": kind, "status": "in_progress"}


def _part(state: State, text: str) -> Json:
    if state is State.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
