"""What happened in a run, one line each, for somebody who has to find out why an invariant did not hold."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum

from google.protobuf.message import Message

from pdserve.base.ids import AttemptKey, Peer, RequestId

MAX_SHOWN = 8  # elements of a sequence
NUM_LAST = 12  # lines told of what happened last, whatever it was about


class Trace:
    """The latest notes: which process handled what, or asked for what."""

    def __init__(self, length: int) -> None:
        """Keep so many notes. All that they name stays in memory, which costs a tenth of the time."""
        self._is_on = length > 0
        self._notes: deque[tuple[float, str, object]] = deque(maxlen=length)

    def note(self, now_s: float, who: str, what: object) -> None:
        if self._is_on:
            self._notes.append((now_s, who, what))

    def story(self, request_id: RequestId | None) -> list[str]:
        """Return what was noted about a request, and the last things noted at all."""
        lines = [
            f"{at_s:10.6f} {who:>7}  {brief(one)}"
            for at_s, who, what in self._notes
            for one in (what if isinstance(what, list) else [what])
        ]
        if request_id is None:
            return lines[-4 * NUM_LAST :]
        about = [line for line in lines if brief(request_id) in line]
        return [*about, "...", *lines[-NUM_LAST:]]


def brief(what: object) -> str:
    """Return a value on one line: requests and processes by their names, and only what is not a default."""
    match what:
        case AttemptKey():
            return f"{brief(what.request_id)} attempt {what.attempt}"
        case Peer():
            return f"{what.worker_id}#{what.incarnation}"
        case bytes():
            text = what.decode("ascii", "replace")
            return text if text.isprintable() and text.isascii() else f"{len(what)} bytes"
        case Enum():
            return what.name
        case float():
            return f"{what:.6g}"
        case Message():
            return " ".join(str(what).split())
        case str() | int() | None:
            return str(what)
        case Sequence():
            shown = [brief(one) for one in what[:MAX_SHOWN]]
            more = [f"... {len(what)} in all"] if len(what) > MAX_SHOWN else []
            return f"[{', '.join(shown + more)}]"
        case _:
            return " ".join((type(what).__name__, *_fields(what))) if is_dataclass(what) else repr(what)


def _fields(what: object) -> Iterator[str]:
    for field in fields(what):  # type: ignore[arg-type]  # it is a dataclass
        value = getattr(what, field.name)
        if field.default is MISSING or value != field.default:
            text = brief(value)
            yield f"{field.name}=({text})" if is_dataclass(value) else f"{field.name}={text}"
