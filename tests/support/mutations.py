"""Bugs on purpose: each breaks one rule of the real cores while it is switched on."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import adapter_mutations
import fetch_mutations
import group_mutations
import membership_mutations
import move_mutations
import pooled_mutations
import rank_mutations
import receiver_mutations
import report_mutations
import role_mutations
import stream_mutations
from breaking import MUTATIONS, Original, breaks, mutation, wrap

from pdserve.base.ids import AttemptKey
from pdserve.decode_worker.incoming import Incoming
from pdserve.engine.decode_room import DecodeRoom
from pdserve.engine.kvcache import KvCache
from pdserve.engine.pages import PagePool
from pdserve.engine.running_step import RunningStep
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Outcome, Sequence
from pdserve.engine.step import Phase, StepPlan, StepResult
from pdserve.kvtransfer.doors import CopyStopped, PeerGone
from pdserve.kvtransfer.session import PagesLanded
from pdserve.prefill_worker import sender
from pdserve.prefill_worker.outgoing import EarlyGrants, Redialling
from pdserve.protocol.page_tables import Pages
from pdserve.router.placement.placements import Placements
from pdserve.router.requests.commands import SequenceSpec
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.delivery import Delivery
from pdserve.router.requests.request import Placement, Request
from pdserve.router.requests.request import Sequence as RouterSequence
from pdserve.router.requests.retry import Retry
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled

__all__ = [
    "MUTATIONS",
    "adapter_mutations",
    "fetch_mutations",
    "group_mutations",
    "membership_mutations",
    "move_mutations",
    "pooled_mutations",
    "rank_mutations",
    "receiver_mutations",
    "report_mutations",
    "role_mutations",
    "stream_mutations",
]  # the latter have put their own among them

# ---- the sender's half


@breaks(sender.Sender, "_give_up")
def release_the_source_while_copying(
    original: Original, self: sender.Sender, reason: str
) -> tuple[sender.Command, ...]:
    """Say that nothing is under way though a copy is."""
    return self._quiesce(reason)


@mutation
def commit_before_the_last_copy_has_landed() -> Iterator[object]:
    num_landed: dict[int, int] = {}

    def stopped(original: Original, self: sender.Sender, copy: CopyStopped) -> tuple[sender.Command, ...]:
        num_landed[id(self)] = num_landed.get(id(self), 0) + len(copy.digests or ())
        return original(self, copy)

    def progress(original: Original, self: sender.Sender) -> tuple[sender.Command, ...]:
        commands = original(self)
        grant = self._grant
        if self.state is sender.State.SENDING and grant and self._capsule and any(self._copying) and not commands:
            self.state = sender.State.LANDED
            num_sent = self._sent - grant.first_page
            missing = PagesLanded((0,) * (num_sent - num_landed.get(id(self), 0)))
            return (missing, sender.Commit(grant.capability, self._capsule))
        return commands

    with wrap(sender.Sender, "_progress", progress) as patched, wrap(sender.Sender, "_copy_stopped", stopped):
        yield patched


# ---- workers


@breaks(WorkerCore, "_react")
def forget_a_cancel_of_a_hand_off_under_way(
    original: Original, self: WorkerCore, event: object, now_s: float
) -> list[object]:
    """Ignore a cancel between prefill's end and the first decode step."""
    arrivals = self.incoming._arrivals
    if isinstance(event, Cancelled) and any(key.request_id == event.request_id for key in arrivals):
        return []
    return original(self, event, now_s)


@breaks(Incoming, "handle")
def ignore_the_incarnation_on_decode_workers(
    original: Original, self: Incoming, event: object, now_s: float
) -> list[object]:
    """Let any process of a worker's name speak for its hand-offs."""
    arrival = self._arrivals.get(getattr(event, "key", None))
    if arrival is not None and hasattr(event, "peer") and event.peer.worker_id == arrival.expected.peer.worker_id:
        event = replace(event, peer=arrival.expected.peer)
    return original(self, event, now_s)


@breaks(WorkerCore, "_react")
def take_one_process_gone_for_all_of_its_name(
    original: Original, self: WorkerCore, event: object, now_s: float
) -> list[object]:
    """Believe that every incarnation has ended when one has."""
    commands = original(self, event, now_s)
    if isinstance(event, PeerGone):
        arrivals = self.incoming._arrivals.values()
        namesakes = {a.expected.peer for a in arrivals if a.expected.peer.worker_id == event.peer.worker_id}
        for peer in sorted(namesakes, key=lambda peer: peer.incarnation):
            commands += original(self, PeerGone(peer), now_s)
    return commands


@breaks(EarlyGrants, "handle")
def drop_grants_that_overtake_their_placement(*_: object) -> list[object]:
    return []


@breaks(Redialling, "dial")
def never_dial_a_lost_peer_again(*_: object) -> list[object]:
    return []


@breaks(Incoming, "give_up")
def release_reused_pages_twice(original: Original, self: Incoming, key: AttemptKey, reason: str) -> list[object]:
    if key in self._arrivals:
        pool = self._scheduler.cache.pool
        pool.release(tuple(p for p in self._arrivals[key].reused.pages.held if pool.holders(p) > 1))
    return original(self, key, reason)


# ---- pages and scheduling


@breaks(DecodeRoom, "_make_for_one")
def write_into_shared_pages(
    original: Original, self: DecodeRoom, step: RunningStep, sequence: Sequence, group: int, number: int
) -> bool:
    """Skip copy-on-write."""
    return sequence.pages.find(group, number) is not None or original(self, step, sequence, group, number)


@breaks(Scheduler, "_admit")
def publish_a_page_before_it_is_full(original: Original, self: Scheduler, sequence: Sequence) -> bool:
    admitted: bool = original(self, sequence)
    if admitted:
        run = range(sequence.num_published, len(sequence.prefix.hashes))
        self.cache.publish(sequence.prefix, sequence.pages, run)
    return admitted


@breaks(KvCache, "_fresh")
def keep_the_index_of_a_page_given_out(original: Original, self: KvCache, pages: Pages) -> Pages:
    return pages


@breaks(PagePool, "grant")
def grant_pages_without_taking_them(original: Original, self: PagePool, count: int) -> Pages | None:
    pages: Pages | None = original(self, count)
    for page in pages or ():
        self._free[page] = None
    return pages


@breaks(Scheduler, "_admit")
def recompute_too_little_after_preemption(original: Original, self: Scheduler, sequence: Sequence) -> bool:
    """Take the last page of a preempted sequence for still computed."""
    admitted: bool = original(self, sequence)
    if admitted and sequence.has_run and sequence.num_missing > self.cache.page_size:
        sequence.computed += self.cache.page_size
    return admitted


@breaks(Scheduler, "commit")
def count_wrong_guesses_as_computed(
    original: Original, self: Scheduler, plan: StepPlan, result: StepResult
) -> tuple[Outcome, ...]:
    step = self.steps[0]
    outcomes: tuple[Outcome, ...] = original(self, plan, result)
    for sequence, chunk, tokens in zip(step.sequences, plan.chunks, result.tokens, strict=True):
        if chunk.num_drafts and tokens and sequence.phase is Phase.DECODE and sequence in self.running:
            sequence.computed += chunk.num_drafts - (len(tokens[0]) - 1)
    return outcomes


@breaks(Scheduler, "release")
def give_pages_back_while_a_step_writes_them(original: Original, self: Scheduler, sequence: Sequence) -> None:
    steps, self.steps = self.steps, deque()
    original(self, sequence)
    self.steps = steps


@breaks(Scheduler, "_end_step")
def take_in_what_a_step_computed_for_a_sequence_that_left(original: Original, self: Scheduler) -> RunningStep:
    step: RunningStep = original(self)
    step.dropped.clear()
    return step


@breaks(Scheduler, "release")
def leak_a_page_of_what_leaves(original: Original, self: Scheduler, sequence: Sequence) -> None:
    """Forget the last page of every longer sequence that gives up its pages."""
    if len(sequence.pages.held) > 4:
        sequence.pages.runs[0].pop()
    original(self, sequence)


# ---- the router


@breaks(RouterSequence, "num_known")
def deliver_tokens_again_after_placing_again(*_: object) -> int:
    return 0


@mutation
def place_again_without_what_was_delivered() -> Iterator[object]:
    """Draw delivered tokens anew, under positions after them."""

    def spec(original: Original, self: Request, placement: Placement, now_s: float) -> SequenceSpec:
        whole: SequenceSpec = original(self, placement, now_s)
        return replace(whole, token_ids=self.prompt_ids)

    with wrap(Request, "spec", spec) as patched, wrap(RouterSequence, "num_known", lambda *_: 0):
        yield patched


@breaks(Placements, "close")
def forget_to_stop_the_other_worker(
    original: Original, self: Placements, request: Request, placement: Placement, *, stop_workers: bool
) -> None:
    original(self, request, placement, stop_workers=False)


@breaks(RouterCore, "_miss_deadline")
def let_deadlines_pass(*_: object) -> None:
    pass


@breaks(Retry, "_again")
def forget_what_a_lost_worker_was_doing(*_: object) -> None:
    pass


@breaks(Retry, "retry_waiting")
def never_wake_requests_that_wait_for_a_pair(*_: object) -> None:
    pass


@breaks(Delivery, "_accept")
def end_a_request_while_a_continuation_runs(
    original: Original, self: Delivery, request: Request, *args: object
) -> bool:
    ended = original(self, request, *args)
    if ended and request.running and request.request_id in self._placements.requests:
        self._placements.finish(request, args[-1])
    return ended
