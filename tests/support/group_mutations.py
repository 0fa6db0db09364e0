"""Bugs on purpose in models whose layers keep KV in several groups."""

from collections.abc import Iterator
from types import SimpleNamespace

from breaking import Original, breaks, mutation, wrap

from pdserve.engine.kvcache import KvCache
from pdserve.engine.prompt_room import PromptRoom
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.prefill_worker import sender
from pdserve.prefill_worker.outgoing import Outgoing
from pdserve.protocol.page_tables import Pages, PageTables
from pdserve.protocol.paging import PageOrder, Paging
from pdserve.worker import core
from pdserve.worker.tasks import Task


@breaks(Paging, "first_needed")
def give_up_a_window_one_token_early(original: Original, self: Paging, group: int, num_tokens: int) -> int:
    first: int = original(self, group, num_tokens + 1)
    return first


@breaks(PageTables, "ordered")
def send_pages_group_by_group(original: Original, self: PageTables, order: PageOrder, num_tokens: int) -> Pages:
    """Name the pages of a hand-off in another order than the receiver does."""
    pages: Pages = original(self, order, num_tokens)
    places = sorted(range(len(pages)), key=order.pages(0, num_tokens).__getitem__)
    return tuple(pages[place] for place in places)


@breaks(PageTables, "take_unneeded")
def give_up_what_the_next_token_still_sees(
    original: Original, self: PageTables, paging: Paging, num_tokens: int
) -> Pages:
    """Release pages of a window early; what a hand-off names stays right."""
    taken: Pages = original(self, paging, num_tokens + 1)
    return taken


@breaks(KvCache, "_needed")
def find_a_prefix_that_one_group_lacks(
    original: Original, self: KvCache, group: int, num_spans: int, num_known: int
) -> range:
    """Do without the first span that later queries see in a group with a window."""
    needed: range = original(self, group, num_spans, num_known)
    return needed if group == 0 or not needed else needed[1:]


@breaks(KvCache, "_last_lack")
def find_a_prefix_by_its_first_group(original: Original, self: KvCache, *of_prefix: object) -> int | None:
    """Ask no other group, and take the first group's pages for those that it lacks."""
    return None


@mutation
def read_announced_pages_without_a_hold() -> Iterator[object]:
    """Let what is announced for a copy be given out again once its sequence has given it up."""

    def announce(original: Original, self: Outgoing, key: object, pages: Pages, now_s: float) -> object:
        count = len(self._handoffs[key].held)
        results = original(self, key, pages, now_s)
        if key in self._handoffs:
            self._pool.release(tuple(pages[count:]))
        return results

    def perform(original: Original, self: Outgoing, handoff: SimpleNamespace, *args: object) -> Iterator[object]:
        if isinstance(args[0], sender.ReleasePages):
            self._pool.share(page for page in handoff.held if self._pool.is_free(page) or self._pool.holders(page))
        yield from original(self, handoff, *args)

    with wrap(Outgoing, "announce", announce) as patched, wrap(Outgoing, "_perform", perform):
        yield patched


@breaks(PromptRoom, "_refill")
def let_a_prompt_begin_that_cannot_be_finished(*_: object) -> None:
    """Replace no page that leaves a window."""


@breaks(core, "final_pages")
def send_a_state_before_its_last_step(
    original: Original, scheduler: Scheduler, task: Task, sequence: Sequence
) -> Pages:
    """Announce the span that a prompt is in the middle of, where there are states."""
    paging = scheduler.cache.paging
    if not paging.has_states or not sequence.computed:
        pages: Pages = original(scheduler, task, sequence)
        return pages
    return sequence.pages.ordered(PageOrder(paging, len(task.job.token_ids)), sequence.computed)


@breaks(Scheduler, "hold")
def send_a_state_while_a_step_changes_it(original: Original, self: Scheduler, sequence: Sequence) -> bool:
    """Let a continuation leave that is in a running step: its KV is final, but its state is not."""
    is_idle: bool = original(self, sequence)
    return is_idle or self.cache.paging.has_states
