"""Bugs on purpose where ranks have memory of their own: parts of copies, routes, and digests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

from breaking import Original, breaks, mutation

from faultsim import cluster, ranks
from pdserve.kvtransfer.doors import CopyStopped
from pdserve.kvtransfer.routes import Route, Share
from pdserve.prefill_worker import sender


@breaks(sender.Sender, "_copy_stopped")
def take_a_copy_for_landed_when_one_rank_has_written_its_part(
    original: Original, self: sender.Sender, stopped: CopyStopped
) -> tuple[sender.Command, ...]:
    """Go on, and commit, before all ranks have landed: the digests of the others are taken for none."""
    commands: tuple[sender.Command, ...] = ()
    if len(self._copying) == 1 or (stopped.digests is None and not stopped.part):
        return tuple(original(self, stopped))
    if stopped.part or stopped.digests is None:
        return ()
    for part in range(len(self._copying)):
        digests = stopped.digests if part == 0 else (0,) * len(stopped.digests)
        commands += original(self, replace(stopped, digests=digests, part=part))
    return commands


@breaks(sender.Sender, "_copy_stopped")
def say_that_nothing_is_under_way_when_one_rank_has_stopped(
    original: Original, self: sender.Sender, stopped: CopyStopped
) -> tuple[sender.Command, ...]:
    """Let the receiver free its pages while another rank still writes to them."""
    if self.state is sender.State.DRAINING:
        self._copying = tuple([min(1, count) * (part == stopped.part) for part, count in enumerate(self._copying)])
    elif self.state in (sender.State.CLOSED, sender.State.IN_DOUBT):
        return ()
    commands: tuple[sender.Command, ...] = original(self, stopped)
    return commands


@breaks(ranks, "routes")
def leave_out_the_last_rank_of_a_receiver(
    original: Original, source: Share, targets: Sequence[Share], run_bytes: int
) -> Iterator[tuple[int, Route]]:
    found = list(original(source, targets, run_bytes))
    yield from found[:-1] if len(targets) > 1 and source.common(targets[-1]) else found


@breaks(Share, "run_numbers")
def take_digests_by_the_place_of_runs_on_their_rank(original: Original, self: Share, whole: Share) -> tuple[int, ...]:
    return tuple(range(self.num_runs))


@mutation
def let_each_rank_send_and_count_all_that_others_hold_as_well() -> Iterator[object]:
    with patch.object(Share, "sent", property(lambda self: self)):
        yield


@mutation
def let_nobody_send_the_part_of_the_last_copy() -> Iterator[object]:
    sent = vars(Share)["sent"].fget

    def of(self: Share) -> Share:
        part: Share = sent(self)
        is_last = self.copy > 0 and self.copy == self.num_copies - 1
        return replace(part, layers=(part.layers[0],) * 2) if is_last else part

    with patch.object(Share, "sent", property(of)):
        yield


@breaks(cluster, "proved_after_s")
def take_the_end_of_the_first_rank_for_that_of_all(original: Original, noticed_s: float, last_rank_s: float) -> float:
    """Report a worker's end, and start its next process, while another rank may still write."""
    return noticed_s
