"""Which running continuations move, where to and when. Pure.

A worker that drains, or whose role is prefill, hands all that it decodes over; one that is about to preempt hands some
over; and an operator may ask for more. A continuation that would end before its move is done stays.

Invariant: at most MAX_MOVES of this router's continuations are on their way from one worker, and as many to one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf

from pdserve.base.ids import RequestId
from pdserve.base.roles import Role
from pdserve.base.values import value
from pdserve.router.placement.placements import Placements
from pdserve.router.placement.predict import Prompt
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import Warn
from pdserve.router.requests.events import LinkId, MovesAsked
from pdserve.router.requests.request import Request, Sequence

MAX_MOVES = 8
_AGAIN_S = 1.0  # between two moves of a continuation, or two tries to move it to the same worker


class Why(Enum):
    ROLE = "it is a prefill worker"
    DRAIN = "it drains"
    ASKED = "an operator asked for it"
    PAGES = "it is about to run out of pages"


@value
class _Candidate:
    request: Request
    sequence: Sequence
    num_left: float  # tokens that it will probably gain

    @property
    def name(self) -> tuple[RequestId, int]:
        return self.request.request_id, self.sequence.index

    @property
    def most_left(self) -> int:
        """Return how many tokens it may gain: a worker to be emptied does not wait for answers longer than expected."""
        return self.request.params.max_tokens - len(self.sequence.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens + len(self.sequence.token_ids)


@dataclass(slots=True)
class _Target:
    """A worker that may take continuations in, during one look."""

    worker: WorkerView
    refused_tokens: float = inf  # the fewest that it has no room for: more need not be tried


@dataclass(slots=True)
class _Order:
    """What an operator asked to move from a worker, and has not moved yet."""

    names: set[tuple[RequestId, int]]
    target: LinkId | None  # None: any


class Moving:
    """Finds continuations that are to move, and workers with room for them."""

    def __init__(self, placements: Placements) -> None:
        self._placements = placements
        self._predictor = placements.predictor
        self._workers = placements.workers
        self._shadows = placements.shadows
        self._orders: dict[LinkId, _Order] = {}  # by source

    def ask(self, event: MovesAsked, now_s: float) -> None:
        """Let an operator's choice move. A later order for the same worker takes the place of an earlier one."""
        source = self._workers.get(event.link)
        if source is None:
            return
        self._orders = {link: order for link, order in self._orders.items() if self._workers.get(link) is not None}
        chosen = self._candidates(source)[: event.max_sequences or None]
        self._orders[event.link] = _Order({candidate.name for candidate in chosen}, event.target)
        self.look(source, now_s)

    def num_movable(self, source: WorkerView) -> int:
        """Return how many of this router's continuations decode on a worker and are not on their way from it."""
        return len(self._candidates(source))

    def look_again(self, now_s: float) -> None:
        """Look at the workers from which moves have ended: others may follow."""
        links, self._shadows.sources = self._shadows.sources, set()
        for link in links:
            source = self._workers.get(link)
            if source is not None:
                self.look(source, now_s)

    def look(self, source: WorkerView, now_s: float) -> None:
        """Start the moves from a worker that have a reason, a place to go and a turn."""
        for why in self._reasons(source):
            if self._start(source, why, now_s):
                return

    def _start(self, source: WorkerView, why: Why, now_s: float) -> bool:
        """Start as many moves for one reason as may be; return whether there are any."""
        num_leaving = self._shadows.num_leaving(source)
        if num_leaving >= MAX_MOVES or (why is Why.PAGES and num_leaving):  # those on their way may be enough
            return False
        order = self._orders.get(source.link) if why is Why.ASKED else None
        targets = self._targets(source, None if order is None else order.target)
        began: list[str] = []
        candidates = self._in_turn(source, why, order, now_s) if targets else []
        num_lacking = -_pages_left(source) if why is Why.PAGES else inf
        fewest_tokens = min([candidate.num_tokens for candidate in candidates], default=0)
        for candidate in candidates:
            target = self._begin(source, candidate, targets, why, now_s)
            if target is not None:
                began.append(target.name)
                num_lacking -= _pages(source, candidate) + source.registration.layout.paging.pages_beside
            targets = [each for each in targets if each.refused_tokens > fewest_tokens]
            if num_leaving + len(began) == MAX_MOVES or not targets or num_lacking <= 0:
                break
        if began:
            there = ", ".join(sorted(set(began)))
            text = f"{len(began)} continuations move from {source.name} to {there}: {why.value}"
            self._placements.emit(Warn(text))
        return bool(began)

    # ---- why

    def _reasons(self, source: WorkerView) -> Iterator[Why]:
        """Yield why continuations of a worker are to move now. The next reason counts where one leads to no move."""
        if not source.shares:
            self._orders.pop(source.link, None)
        elif source.draining:
            yield Why.DRAIN
        elif not source.role.is_in(Role.DECODE):
            yield Why.ROLE
        else:
            if self._is_ordered(source):
                yield Why.ASKED
            if _pages_left(source) < 0:
                yield Why.PAGES

    def _is_ordered(self, source: WorkerView) -> bool:
        order = self._orders.get(source.link)
        if order is not None and order.target is not None and self._workers.get(order.target) is None:
            text = f"{source.name} keeps what an operator asked to move: its target has left"
            self._placements.emit(Warn(text))
            order = None
            del self._orders[source.link]
        return order is not None

    # ---- which

    def _candidates(self, source: WorkerView) -> list[_Candidate]:
        """Return the continuations that decode on a worker and do not move, those with most tokens to come first."""
        lengths = self._predictor.lengths
        found = [
            _Candidate(
                request,
                sequence,
                lengths.left(len(sequence.token_ids), request.params.max_tokens, request.output_tokens),
            )
            for request, sequence in self._decoding(source)
            if sequence.shadow is None
        ]
        return sorted(found, key=lambda candidate: (-candidate.num_left, candidate.name))

    def _decoding(self, source: WorkerView) -> Iterator[tuple[Request, Sequence]]:
        for request_id, attempt in source.shares:
            request = self._placements.requests[request_id]
            placement = request.placements[attempt]
            if placement.decode is source and placement.committed and placement.prefill is None:
                for index in placement.running:
                    yield request, request.sequences[index]

    def _in_turn(self, source: WorkerView, why: Why, order: _Order | None, now_s: float) -> list[_Candidate]:
        """Return the candidates that may move now for this reason, in the order in which they are to."""
        candidates = self._candidates(source)
        if order is not None:
            candidates = [candidate for candidate in candidates if candidate.name in order.names]
            order.names &= {(each.request_id, sequence.index) for each, sequence in self._decoding(source)}
            if not order.names:  # all have ended, or moved
                del self._orders[source.link]
        rested = [candidate for candidate in candidates if now_s - candidate.sequence.move_asked_s >= _AGAIN_S]
        if why is Why.PAGES:  # first that which would take most pages
            rested.sort(key=lambda candidate: -(candidate.num_tokens + candidate.num_left))
        return rested

    # ---- where to

    def _targets(self, source: WorkerView, wanted: LinkId | None) -> list[_Target]:
        return [
            _Target(worker)
            for worker in self._workers.routable(Role.DECODE)
            if worker is not source and worker.kind == source.kind and not worker.is_failing
            if worker.coming_role.is_in(Role.DECODE)
            if wanted is None or worker.link == wanted
        ]

    def _begin(
        self, source: WorkerView, candidate: _Candidate, targets: list[_Target], why: Why, now_s: float
    ) -> WorkerView | None:
        """Start a continuation's move; return the worker to which, or None where it stays.

        It goes where it will decode fastest, to a worker that computes prompts only if there is no other.
        """
        layout, step_s = source.registration.layout, self._step_s(source)
        num_left = candidate.num_left if why is Why.PAGES else candidate.most_left
        takes_s = self._shadows.takes_s(now_s)
        if num_left * step_s < takes_s:
            return None
        num_pages = _pages(source, candidate) + layout.paging.pages_beside
        speeds = [
            (target.worker.pending_prefill_tokens > 0, speed_s, target.worker.name, target.worker)
            for target in targets
            if now_s - candidate.sequence.refused_s.get(target.worker.link, -inf) >= _AGAIN_S
            if why is not Why.PAGES or _pages_left(target.worker) >= num_pages
            if (speed_s := self._speed_s(candidate, target)) is not None
        ]
        if not speeds:
            return None
        target = min(speeds)[3]
        copy_s = self._copy_s(source, target, candidate)
        move_s = takes_s + copy_s
        if num_left * step_s < move_s:
            return None
        extra_tokens = ceil(layout.paging.pages_beside * layout.page_size + 2 * move_s / step_s)
        self._placements.move(candidate.request, candidate.sequence, target, (extra_tokens, copy_s), now_s)
        return target

    def _speed_s(self, candidate: _Candidate, target: _Target) -> float | None:
        """Return how long a step would be for a continuation on a worker; None where there is no room for it."""
        worker, num_tokens, max_tokens = target.worker, candidate.num_tokens, candidate.most_left
        if num_tokens >= target.refused_tokens or num_tokens + max_tokens > worker.max_num_tokens:
            return None
        if self._shadows.num_coming(worker) >= MAX_MOVES or not worker.has(candidate.request.scope.adapter):
            return None
        prompt = Prompt(num_tokens, 1, {}, candidate.request.priority, max_tokens)
        step_s, lacks = self._predictor.decode_step(worker, prompt)
        if lacks is None:
            return step_s
        target.refused_tokens = num_tokens
        return None

    def _step_s(self, source: WorkerView) -> float:
        num_running = max(1, source.num_sequences - source.num_arriving)
        return max(1e-6, self._predictor.costs.of(source).token_s(num_running, source.kv_tokens))

    def _copy_s(self, source: WorkerView, target: WorkerView, candidate: _Candidate) -> float:
        """Return how long a continuation's pages probably take, beside those that are on their way from there."""
        layout, links = target.registration.layout, self._predictor.links
        num_bytes = layout.sent_bytes(candidate.num_tokens)
        beside = self._shadows.num_leaving(source) + 1
        return links.latency_s + beside * num_bytes / links.bytes_per_s((source.name, target.name))


def _pages(source: WorkerView, candidate: _Candidate) -> int:
    """Return how many pages a continuation has."""
    return source.registration.layout.paging.most_pages(candidate.num_tokens)


def _pages_left(worker: WorkerView) -> float:
    """Return how many pages are free beyond what each sequence that decodes is about to need; below 0, it preempts."""
    return worker.num_free_pages - worker.registration.layout.paging.pages_beside * (
        worker.num_sequences - worker.num_arriving
    )
