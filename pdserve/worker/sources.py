"""Where leading pages of a prompt may come from, instead of being computed. Does no I/O.

Invariant: a source that has begun answers once, with `Admitted` or `NotAdmitted`, as a hand-off that arrives does. A
source that is given up before does not answer.
"""

from typing import Protocol

from pdserve.base.ids import AttemptKey
from pdserve.decode_worker.granting import Expected
from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.kvcache import Prefix
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer.doors import Result
from pdserve.worker.messages import Fetch
from pdserve.worker.tasks import Task


class Source(Protocol):
    """Another worker, or another tier of this one."""

    def num_tokens(self, prefix: Prefix) -> int:
        """Return how many leading tokens of a prompt it probably has pages of."""
        ...

    def due_s(self, num_tokens: int, now_s: float) -> float:
        """Return by when pages of so many tokens would be here. After it the prompt is computed without them."""
        ...

    def begin(self, task: Task, sequence: Sequence, num_tokens: int) -> list[Result]:
        """Set pages aside and let KV of the leading tokens come; or return nothing, and change nothing."""
        ...

    def give_up(self, key: AttemptKey, reason: str) -> list[Result]:
        """Let nothing more come, if anything was to. Its pages are free once they are safe."""
        ...


class FromPeer:
    """A worker that hands its cached pages off. Its router predicts what it has, and how long that takes."""

    def __init__(self, incoming: Incoming, fetch: Fetch) -> None:
        self._incoming = incoming
        self._fetch = fetch

    def num_tokens(self, prefix: Prefix) -> int:
        del prefix  # whose tokens the router has looked up
        return self._fetch.num_tokens

    def due_s(self, num_tokens: int, now_s: float) -> float:
        del num_tokens, now_s  # with which the router has predicted
        return self._fetch.deadline_s

    def begin(self, task: Task, sequence: Sequence, num_tokens: int) -> list[Result]:
        if self._incoming.is_open(task.key):
            return []  # a former fetch of that name has yet to end
        holder, prefix = self._fetch.holder, sequence.prefix
        expected = Expected(task.key, holder, task.job, task.order, prefix, num_tokens, is_prefix=True)
        return self._incoming.expect_now(expected)

    def give_up(self, key: AttemptKey, reason: str) -> list[Result]:
        return self._incoming.give_up(key, reason)
