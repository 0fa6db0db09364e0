"""Bugs on purpose: each breaks one rule of the real cores while it is switched on."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import fetch_mutations
import membership_mutations
import move_mutations
import receiver_mutations
import role_mutations
import stream_mutations
from breaking import MUTATIONS, Original, mutation, wrap

from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.kvcache import KvCache
from pdserve.engine.pages import PagePool
from pdserve.engine.running import RunningStep
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.kvtransfer import sender
from pdserve.kvtransfer.doors import PeerGone
from pdserve.kvtransfer.session import HandoffKey, Pages, PagesLanded
from pdserve.prefill_worker.early_grants import EarlyGrants
from pdserve.prefill_worker.redialling import Redialling
from pdserve.router.commands import SequenceSpec
from pdserve.router.core import RouterCore
from pdserve.router.delivery import Delivery
from pdserve.router.placements import Placements
from pdserve.router.request import Placement, Request
from pdserve.router.request import Sequence as RouterSequence
from pdserve.router.retry import Retry
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled

__all__ = [
    "MUTATIONS",
    "fetch_mutations",
    "membership_mutations",
    "move_mutations",
    "receiver_mutations",
    "role_mutations",
    "stream_mutations",
]  # the latter have put their own among them

# ---- the sender's half


@mutation
def release_the_source_while_copying() -> Iterator[object]:
    """Say that nothing is under way though a copy is."""
    with wrap(sender.Sender, "_give_up", lambda original, self, reason: self._quiesce(reason)) as patched:
        yield patched


@mutation
def commit_before_the_last_copy_has_landed() -> Iterator[object]:
    num_landed: dict[int, int] = {}

    def stopped(original: Original, self: sender.Sender, copy: sender.CopyStopped) -> tuple[sender.Command, ...]:
        num_landed[id(self)] = num_landed.get(id(self), 0) + len(copy.digests or ())
        return original(self, copy)

    def progress(original: Original, self: sender.Sender) -> tuple[sender.Command, ...]:
        commands = original(self)
        grant = self._grant
        if self.state is sender.State.SENDING and grant and self._capsule and self._copying and not commands:
            self.state = sender.State.LANDED
            missing = PagesLanded((0,) * (self.num_pages_sent - num_landed.get(id(self), 0)))
            return (missing, sender.Commit.of(grant, self._capsule))
        return commands

    with wrap(sender.Sender, "_progress", progress) as patched, wrap(sender.Sender, "_copy_stopped", stopped):
        yield patched


# ---- workers


@mutation
def forget_a_cancel_of_a_hand_off_under_way() -> Iterator[object]:
    """Ignore a cancel between prefill's end and the first decode step."""

    def react(original: Original, self: WorkerCore, event: object, now_s: float) -> list[object]:
        arrivals = self.incoming._arrivals
        if isinstance(event, Cancelled) and any(key.request_id == event.request_id for key in arrivals):
            return []
        return original(self, event, now_s)

    with wrap(WorkerCore, "_react", react) as patched:
        yield patched


@mutation
def ignore_the_incarnation_on_decode_workers() -> Iterator[object]:
    """Let any process of a worker's name speak for its hand-offs."""

    def handle(original: Original, self: Incoming, event: object, now_s: float) -> list[object]:
        arrival = self._arrivals.get(getattr(event, "key", None))
        if arrival is not None and hasattr(event, "peer") and event.peer.worker_id == arrival.expected.peer.worker_id:
            event = replace(event, peer=arrival.expected.peer)
        return original(self, event, now_s)

    with wrap(Incoming, "handle", handle) as patched:
        yield patched


@mutation
def take_one_process_gone_for_all_of_its_name() -> Iterator[object]:
    """Believe that every incarnation has ended when one has."""

    def react(original: Original, self: WorkerCore, event: object, now_s: float) -> list[object]:
        commands = original(self, event, now_s)
        if isinstance(event, PeerGone):
            arrivals = self.incoming._arrivals.values()
            namesakes = {a.expected.peer for a in arrivals if a.expected.peer.worker_id == event.peer.worker_id}
            for peer in sorted(namesakes, key=lambda peer: peer.incarnation):
                commands += original(self, PeerGone(peer), now_s)
        return commands

    with wrap(WorkerCore, "_react", react) as patched:
        yield patched


@mutation
def drop_grants_that_overtake_their_placement() -> Iterator[object]:
    with wrap(EarlyGrants, "handle", lambda original, self, said, now_s: []) as patched:
        yield patched


@mutation
def never_dial_a_lost_peer_again() -> Iterator[object]:
    with wrap(Redialling, "dial", lambda original, self, now_s: []) as patched:
        yield patched


@mutation
def release_reused_pages_twice() -> Iterator[object]:
    def give_up(original: Original, self: Incoming, key: HandoffKey, reason: str) -> list[object]:
        if key in self._arrivals:
            pool = self._scheduler.cache.pool
            pool.release(tuple(p for p in self._arrivals[key].reused if pool.holders(p) > 1))
        return original(self, key, reason)

    with wrap(Incoming, "give_up", give_up) as patched:
        yield patched


# ---- pages and scheduling


@mutation
def write_into_shared_pages() -> Iterator[object]:
    """Skip copy-on-write."""

    def make_room(original: Original, self: Scheduler, step: RunningStep, sequence: Sequence) -> bool:
        if sequence.computed // self.cache.page_size < len(sequence.pages):
            return True
        return original(self, step, sequence)

    with wrap(Scheduler, "_make_room", make_room) as patched:
        yield patched


@mutation
def publish_a_page_before_it_is_full() -> Iterator[object]:
    def admit(original: Original, self: Scheduler, sequence: Sequence) -> bool:
        admitted: bool = original(self, sequence)
        if admitted:
            run = range(sequence.num_published, len(sequence.prefix.hashes))
            self.cache.publish(sequence.prefix, sequence.pages, run)
        return admitted

    with wrap(Scheduler, "_admit", admit) as patched:
        yield patched


@mutation
def keep_the_index_of_a_page_given_out() -> Iterator[object]:
    with wrap(KvCache, "_fresh", lambda original, self, pages: pages) as patched:
        yield patched


@mutation
def grant_pages_without_taking_them() -> Iterator[object]:
    def grant(original: Original, self: PagePool, count: int) -> Pages | None:
        pages: Pages | None = original(self, count)
        for page in pages or ():
            self._free[page] = None
        return pages

    with wrap(PagePool, "grant", grant) as patched:
        yield patched


@mutation
def recompute_too_little_after_preemption() -> Iterator[object]:
    """Take the last page of a preempted sequence for still computed."""

    def admit(original: Original, self: Scheduler, sequence: Sequence) -> bool:
        admitted: bool = original(self, sequence)
        if admitted and sequence.has_run and sequence.num_missing > self.cache.page_size:
            sequence.computed += self.cache.page_size
        return admitted

    with wrap(Scheduler, "_admit", admit) as patched:
        yield patched


@mutation
def give_pages_back_while_a_step_writes_them() -> Iterator[object]:
    def release(original: Original, self: Scheduler, sequence: Sequence) -> None:
        steps, self.steps = self.steps, deque()
        original(self, sequence)
        self.steps = steps

    with wrap(Scheduler, "release", release) as patched:
        yield patched


@mutation
def take_in_what_a_step_computed_for_a_sequence_that_left() -> Iterator[object]:
    def end_step(original: Original, self: Scheduler) -> RunningStep:
        step: RunningStep = original(self)
        step.dropped.clear()
        return step

    with wrap(Scheduler, "_end_step", end_step) as patched:
        yield patched


@mutation
def leak_a_page_of_what_leaves() -> Iterator[object]:
    """Forget the last page of every longer sequence that gives up its pages."""

    def release(original: Original, self: Scheduler, sequence: Sequence) -> None:
        if len(sequence.pages) > 4:
            sequence.pages.pop()
        original(self, sequence)

    with wrap(Scheduler, "release", release) as patched:
        yield patched


# ---- the router


@mutation
def deliver_tokens_again_after_placing_again() -> Iterator[object]:
    with wrap(RouterSequence, "num_known", lambda original, self, delta: 0) as patched:
        yield patched


@mutation
def place_again_without_what_was_delivered() -> Iterator[object]:
    """Draw delivered tokens anew, under positions after them."""

    def spec(original: Original, self: Request, placement: Placement, now_s: float) -> SequenceSpec:
        whole: SequenceSpec = original(self, placement, now_s)
        return replace(whole, token_ids=self.prompt_ids)

    with wrap(Request, "spec", spec) as patched, wrap(RouterSequence, "num_known", lambda *_: 0):
        yield patched


@mutation
def forget_to_stop_the_other_worker() -> Iterator[object]:
    def close(
        original: Original, self: Placements, request: Request, placement: Placement, *, stop_workers: bool
    ) -> None:
        original(self, request, placement, stop_workers=False)

    with wrap(Placements, "close", close) as patched:
        yield patched


@mutation
def let_deadlines_pass() -> Iterator[object]:
    with wrap(RouterCore, "_miss_deadline", lambda original, self, request: None) as patched:
        yield patched


@mutation
def forget_what_a_lost_worker_was_doing() -> Iterator[object]:
    with wrap(Retry, "_again", lambda original, self, *args: None) as patched:
        yield patched


@mutation
def never_wake_requests_that_wait_for_a_pair() -> Iterator[object]:
    with wrap(Retry, "retry_waiting", lambda original, self, now_s: None) as patched:
        yield patched


@mutation
def end_a_request_while_a_continuation_runs() -> Iterator[object]:
    def accept(original: Original, self: Delivery, request: Request, *args: object) -> bool:
        ended = original(self, request, *args)
        if ended and request.running and request.request_id in self._placements.requests:
            self._placements.finish(request, args[-1])
        return ended

    with wrap(Delivery, "_accept", accept) as patched:
        yield patched
