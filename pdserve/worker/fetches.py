"""Cached pages of prompts: a worker that has them shares them, the one that computes fetches them. Does no I/O.

A fetch waits for its source, whichever that is (`worker/sources.py`), and is given up when it is due.

Invariant: a prompt starts once, whatever becomes of its fetch, and no later than its fetch is due. Every page that a
fetch holds is given back when its prompt has started, when the task has ended, or when the fetch is due.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from pdserve.base.ids import AttemptKey
from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.kvcache import NO_HIT, Hit, Prefix
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.doors import Claim, Result
from pdserve.kvtransfer.session import Capsule
from pdserve.prefill_worker.outgoing import Outgoing
from pdserve.prefill_worker.starting import Starting
from pdserve.protocol.page_tables import Pages
from pdserve.protocol.paging import PageOrder
from pdserve.protocol.reports import Stage
from pdserve.worker.messages import Fetch, Progress, Reported, ShareAsked
from pdserve.worker.sources import FromPeer, Source
from pdserve.worker.tasks import Task, Tasks

MAX_SHARES = 256  # under way at once; prompts for which more are asked for are computed


@dataclass(slots=True, eq=False)
class _Fetch:
    task: Task
    sequence: Sequence
    source: Source
    due_s: float
    pages: Pages = ()  # held: those that have arrived, and those that were cached here
    has_started: bool = False  # the prompt waits for its turn, or has had it


@dataclass(slots=True, eq=False)
class _Share:
    deadline_s: float
    hit: Hit  # held until the receiver has granted pages for it


class Fetches:
    """The fetches of prompts that are computed here, and what is shared with prompts that are computed elsewhere."""

    def __init__(
        self, scheduler: Scheduler, tasks: Tasks, starting: Starting, outgoing: Outgoing, incoming: Incoming
    ) -> None:
        self._scheduler = scheduler
        self._tasks = tasks
        self._starting = starting
        self._outgoing = outgoing
        self._incoming = incoming
        self._fetches: dict[AttemptKey, _Fetch] = {}
        self._shares: dict[AttemptKey, _Share] = {}

    @property
    def due_s(self) -> float:
        """When `go_on` is to be called at the latest."""
        due_s = [*(each.due_s for each in self._fetches.values()), *(each.deadline_s for each in self._shares.values())]
        return min(due_s, default=inf)

    def claims(self) -> Iterator[Claim]:
        yield from (Claim(held=fetch.pages) for fetch in self._fetches.values())
        yield from (Claim(held=share.hit.pages.held) for share in self._shares.values())

    def shares(self, key: AttemptKey) -> bool:
        return key in self._shares

    def fetches(self, key: AttemptKey) -> bool:
        return key in self._fetches

    # ---- the worker that has the pages

    def share(self, asked: ShareAsked, now_s: float) -> list[Result]:
        """Send the full pages of a prefix that are cached here. If there are none, the receiver gets Quiesced."""
        key, outgoing, cache = asked.key, self._outgoing, self._scheduler.cache
        if outgoing.is_open(key) or outgoing.is_closed(asked.target, key):
            return []
        results = outgoing.open(key, asked.target, asked.target_address, now_s)
        if asked.deadline_s <= now_s or len(self._shares) >= MAX_SHARES:
            return results + outgoing.give_up(key, "it is late, or one of too many", now_s)
        num_asked = len(asked.token_ids) // cache.page_size
        hit = cache.reuse(Prefix(asked.token_ids, asked.scope), num_asked)
        self._shares[key] = _Share(asked.deadline_s, hit)
        if not hit.num_spans:
            return results + outgoing.give_up(key, "nothing of it is cached here", now_s)
        if hit.num_spans < num_asked and cache.paging.has_windows:  # other pages of it are needed than were asked for
            return results + outgoing.give_up(key, "less of it is cached here", now_s)
        return results

    def conclude_share(self, outcome: doors.Leaving, now_s: float) -> list[Result]:
        """Send as many of the pages as there is room for, or give them back."""
        key, outgoing, cache, share = outcome.key, self._outgoing, self._scheduler.cache, self._shares[outcome.key]
        hit, share.hit = share.hit, NO_HIT
        if not isinstance(outcome, doors.Granted):
            del self._shares[key]
        sender = outgoing.half(key)
        num_cached = hit.num_spans * cache.page_size
        order = PageOrder(cache.paging, num_cached)
        room = order.num_tokens(sender.num_granted) // cache.page_size * cache.page_size if sender is not None else 0
        num_tokens, results = min(num_cached, room), list[Result]()
        if num_tokens:
            results += outgoing.announce(key, hit.pages.ordered(order, num_tokens), now_s)
            results += outgoing.finish(key, Capsule(num_tokens, ()), now_s)
        cache.pool.release(hit.pages.held)  # `outgoing` holds those that it sends
        return results

    # ---- the worker that computes the prompt

    def start(self, task: Task, sequence: Sequence, fetch: Fetch | None, now_s: float) -> list[Reported]:
        """Let a prompt start: at once, or once the pages that it fetches have come."""
        source = self._source(fetch)
        results: list[Reported] = [] if source is None else self._fetch(task, sequence, source, now_s)
        if task.key not in self._fetches:
            self._start(task, sequence)
        return results

    def conclude_fetch(self, outcome: doors.Arriving, now_s: float) -> list[Reported]:
        """Take what has arrived into the prefix cache, and let the prompt start; or start without it."""
        fetch = self._fetches[outcome.key]
        match outcome:
            case doors.Admitted(_, pages, num_reused, capsule):
                cache = self._scheduler.cache
                num_spans = max(num_reused, capsule.num_tokens // cache.page_size)
                cache.publish(fetch.sequence.prefix, pages, range(num_reused, num_spans))
                fetch.pages, fetch.has_started = pages.held, True
                return self._end(fetch, now_s, num_spans - num_reused, num_reused)
            case doors.NotAdmitted():
                del self._fetches[outcome.key]
                return self._end(fetch, now_s)
            case _:
                pass  # on its way
        return []

    def go_on(self, now_s: float) -> list[Reported]:
        """Give back pages that are not needed any more, and start prompts whose pages are late."""
        results: list[Reported] = []
        for key, fetch in list(self._fetches.items()):
            is_over = not self._tasks.runs(fetch.task, fetch.sequence) or bool(fetch.sequence.pages)
            if is_over or fetch.due_s <= now_s:
                del self._fetches[key]
                self._scheduler.cache.pool.release(fetch.pages)
                if not fetch.has_started:
                    results += fetch.source.give_up(key, "its prompt has ended" if is_over else "it is late")
                    results += self._end(fetch, now_s)
        for key, share in list(self._shares.items()):
            if share.deadline_s <= now_s:
                results += self._outgoing.give_up(key, "it is late", now_s)
            if share.deadline_s <= now_s or not self._outgoing.is_open(key):
                self._scheduler.cache.pool.release(self._shares.pop(key).hit.pages.held)
        return results

    def _source(self, fetch: Fetch | None) -> Source | None:
        return None if fetch is None else FromPeer(self._incoming, fetch)

    def _fetch(self, task: Task, sequence: Sequence, source: Source, now_s: float) -> list[Reported]:
        """Let a source begin if there is room now, and if more pages come than are cached here.

        Otherwise report that nothing is fetched.
        """
        cache = self._scheduler.cache
        num_spans = min(source.num_tokens(sequence.prefix), len(task.job.token_ids) - 1) // cache.page_size
        here = cache.reuse(sequence.prefix, num_spans)
        cache.pool.release(here.pages.held)
        num_tokens = num_spans * cache.page_size
        due_s = source.due_s(num_tokens, now_s)
        is_of_use = here.num_spans < num_spans and due_s > now_s
        results = source.begin(task, sequence, num_tokens) if is_of_use else []
        if not results:
            return [self._report(task, now_s, 0, here.num_spans)]
        self._fetches[task.key] = _Fetch(task, sequence, source, due_s)
        return [*results]

    def _end(self, fetch: _Fetch, now_s: float, num_came: int = 0, num_reused: int = 0) -> list[Reported]:
        """Report what a fetch has brought, and let its prompt start, unless the task has ended before."""
        if not self._tasks.runs(fetch.task, fetch.sequence):
            return []
        self._start(fetch.task, fetch.sequence)
        return [self._report(fetch.task, now_s, num_came, num_reused)]

    def _report(self, task: Task, now_s: float, num_came: int, num_reused: int) -> Progress:
        num_tokens = num_came * self._scheduler.cache.page_size
        return Progress(task.router, task.key, Stage.FETCHED, now_s, cached_tokens=num_tokens, pages_reused=num_reused)

    def _start(self, task: Task, sequence: Sequence) -> None:
        sender = self._outgoing.half(task.key)
        leaves = task.target is not None and not (sender is not None and sender.num_granted)
        self._starting.add(sequence, leaves=leaves)
