"""A second source of leading pages: this worker's own host memory, from which a copy in memory brings them.

It has what a test has put there. What it has begun lands, or fails, when the test says so.
"""

from dataclasses import dataclass, field

from joined_cores import Node

from pdserve.base.ids import AttemptKey
from pdserve.engine.kvcache import Prefix
from pdserve.engine.pages import Pages
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import Result
from pdserve.kvtransfer.session import Capsule
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.prefix_hash import EVERYONE
from pdserve.protocol.reports import Failure
from pdserve.worker.fetches import Fetches
from pdserve.worker.messages import Command, Fetch
from pdserve.worker.sources import Source
from pdserve.worker.tasks import Task

PAGE_S = 0.25  # that a copy of a page takes


@dataclass
class Restoring:
    """A prompt whose pages come from the host."""

    reused: Pages
    granted: Pages
    contents: list[bytes]  # of all its pages


@dataclass
class Host:
    """Pages of prefixes in the memory of a worker's host: a source, for one worker."""

    node: Node
    kept: dict[tuple[int, ...], bytes] = field(default_factory=dict)  # each page by all tokens up to its last
    under_way: dict[AttemptKey, Restoring] = field(default_factory=dict)

    def __post_init__(self) -> None:
        core, self.cache = self.node.core, self.node.scheduler.cache
        core._fetches = HostFetches(self, core._fetches)

    def keep(self, token_ids: tuple[int, ...], num_left: int = 0) -> None:
        """Copy what is cached of a prompt here, and let the device forget it but for the first `num_left` pages."""
        pages = self.cache.reuse(Prefix(token_ids, EVERYONE), len(token_ids) // self.cache.page_size).pages.held
        for number, page in enumerate(pages, start=1):
            self.kept[token_ids[: number * self.cache.page_size]] = self.node.runner.read(page)
        self.cache.pool.release(pages[num_left:])
        others = self.cache.take(self.cache.pool.num_free)
        assert others is not None
        self.cache.pool.release((*pages[:num_left], *others))

    # ---- what a source does

    def num_tokens(self, prefix: Prefix) -> int:
        tokens, size, count = tuple(prefix.token_ids), self.cache.page_size, 0
        while tokens[: (count + 1) * size] in self.kept:
            count += 1
        return count * size

    def due_s(self, num_tokens: int, now_s: float) -> float:
        return now_s + PAGE_S * (num_tokens // self.cache.page_size)

    def begin(self, task: Task, sequence: Sequence, num_tokens: int) -> list[Result]:
        tokens, size = tuple(task.job.token_ids), self.cache.page_size
        reused = self.cache.reuse(sequence.prefix, num_tokens // size).pages.held
        granted = self.cache.grant(num_tokens // size - len(reused))
        if granted is None:
            self.cache.pool.release(reused)
            return []
        contents = [self.kept[tokens[:end]] for end in range(size, num_tokens + 1, size)]
        self.under_way[task.key] = Restoring(reused, granted, contents)
        return [doors.Reserved(task.key, len(reused))]

    def give_up(self, key: AttemptKey, reason: str) -> list[Result]:
        restoring = self.under_way.pop(key, None)
        if restoring is not None:
            self.cache.pool.release(restoring.reused)
            self.cache.pool.ungrant(restoring.granted)
        return []

    # ---- what becomes of what it has begun

    def land(self, key: AttemptKey, now_s: float) -> list[Command]:
        """Write the pages of a fetch, and give them to the worker."""
        restoring = self.under_way.pop(key)
        pages, num_reused = (*restoring.reused, *restoring.granted), len(restoring.reused)
        for page, content in zip(restoring.granted, restoring.contents[num_reused:], strict=True):
            self.node.runner.write(page, content)
        self.cache.pool.adopt(restoring.granted)
        capsule = Capsule(len(pages) * self.cache.page_size, ())
        return self._hear(doors.Admitted(key, PageTables((list(pages),)), num_reused, capsule), now_s)

    def fail(self, key: AttemptKey, now_s: float) -> list[Command]:
        self.give_up(key, "broken by the test")
        return self._hear(doors.NotAdmitted(key, Failure.TRANSFER_FAILED, "broken by the test"), now_s)

    def _hear(self, outcome: doors.Arriving, now_s: float) -> list[Command]:
        """Let the core take an outcome, as at the end of each event."""
        core = self.node.core
        return [*core._take([outcome], now_s), *core._use_room(now_s)]


class HostFetches(Fetches):
    """Looks in the host's memory for what no router has named another worker for."""

    def __init__(self, host: Host, of_peers: Fetches) -> None:
        each = of_peers
        super().__init__(each._scheduler, each._tasks, each._starting, each._outgoing, each._incoming)
        self._host = host

    def _source(self, fetch: Fetch | None) -> Source | None:
        return self._host if fetch is None else super()._source(fetch)
