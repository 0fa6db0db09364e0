"""A cluster under load while roles change, answers move and workers come and go, with every token checked."""

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from statistics import fmean

from pdserve.clock import MonotonicClock
from pdserve.launch.admin import LauncherClient
from pdserve.launch.plan import ClusterSpec
from pdserve.measure.chaos import REQUEST_DEADLINE_S, Tally, tally
from pdserve.measure.client import Client, new_tenant
from pdserve.measure.known_answers import KnownRequest, check_answer
from pdserve.measure.live import Report, recovered, saturate, started
from pdserve.measure.operations import Operations, OperationsPlan, Record
from pdserve.measure.outcomes import Moved, Outcome
from pdserve.measure.summary import Percentiles, percentiles
from pdserve.measure.workload import Arrival

STEPS_ALLOWED = 3  # that a move may cost, beside the transfer of the last page
_NEAR = 12  # gaps on each side of a move: their mean stands for the time of a step then


@dataclass(frozen=True, slots=True)
class MovedGap:
    """The longest time between two tokens of an answer where it moved."""

    at_s: float  # when it began
    gap_s: float
    first_s: float  # the gap that ends with the target's first token; `gap_s` is the longer of it and the next
    step_s: float  # mean gap around the move: a mean, because a busy client reads several tokens at once
    move: Moved | None  # None: of an answer that never moved

    @property
    def allowed_s(self) -> float:
        return STEPS_ALLOWED * self.step_s + (self.move.handoff_s if self.move is not None else 0.0)


@dataclass(frozen=True, slots=True)
class MovesVerdict:
    capacity_per_s: float
    rate_per_s: float
    tally: Tally
    moves: dict[str, int]  # by how they ended, as the router counts
    record: Record
    gaps: tuple[MovedGap, ...]  # of moved answers
    beside: tuple[MovedGap, ...]  # of answers that never moved, at the moments of moves
    free_after_s: float | None
    left_over: str
    num_ended: int  # requests, as the router counts

    @property
    def is_clean(self) -> bool:
        """Return whether all was done, every request answered rightly and ended once, and every page came back."""
        is_right = self.tally.num_right == self.tally.summary.num_requests == self.num_ended
        return is_right and not self.left_over and self.record.is_complete

    @property
    def result(self) -> dict[str, object]:
        """The verdict as its table and its JSON have it: all on one level."""
        record, fields = self.record, asdict(self)
        del fields["tally"]
        return {
            **self.tally.result,
            **fields,
            "done": {"flips": len(record.flips_s), "drains": len(record.drains_s), "starts": len(record.starts_s)},
            "num_calls_refused": len(record.refused),
            "flip_s": percentiles(record.flips_s),
            "drain_s": percentiles(record.drains_s),
            "start_s": percentiles(record.starts_s),
            "move_gap_s": percentiles(gap.gap_s for gap in self.gaps),
            "step_beside_it_s": percentiles(gap.step_s for gap in self.gaps),
            "move_gap_over_allowed": over_allowed(self.gaps),
            "first_gap_over_allowed": percentiles(g.first_s / g.allowed_s for g in self.gaps if g.allowed_s),
            "unmoved_gap_over_allowed": over_allowed(self.beside),
        }


async def run_moves(
    spec: ClusterSpec,
    load: float,
    calibration_s: float,
    plan: OperationsPlan,
    requests: Sequence[KnownRequest],
    report: Report,
) -> MovesVerdict:
    """Start a cluster, load it with this share of its capacity, and do an operator's work on it meanwhile."""
    clock, gaps, unmoved = MonotonicClock(), list[MovedGap](), list[Sequence[float]]()
    async with started(spec, report) as (cluster, live, board):
        report("calibrating: keeping the cluster full")
        capacity = await saturate(live.client, *_as_arrivals(requests), calibration_s)
        await recovered(cluster, board)
        before, rate = sum(board.last.ended.values()), load * capacity
        report(f"capacity {capacity:.2f} requests/s; operating under {rate:.2f} requests/s")

        def on_end(outcome: Outcome) -> None:
            gaps.extend(moved_gaps(outcome))
            moved = {move.index for move in outcome.moves}
            unmoved.extend(times_s for index, times_s in outcome.times_s.items() if index not in moved)
            check_answer(outcome, requests)
            if not outcome.is_good:
                report(f"{outcome}")

        state = cluster.state
        launcher = LauncherClient(state.launcher, state.secret_file, state.identity_dir)
        operations = Operations(cluster, board, (state.operator(), launcher), plan, clock)
        async with asyncio.TaskGroup() as tasks:
            operating = tasks.create_task(operations.run())
            outcomes = await _load(live.client, requests, rate, operating, on_end)
        free_after_s, left_over = await recovered(cluster, board)
        return MovesVerdict(
            capacity_per_s=capacity,
            rate_per_s=rate,
            tally=tally("moves", outcomes),
            moves=dict(board.last.moves),
            record=operations.record,
            gaps=tuple(gaps),
            beside=tuple(gaps_beside(gaps, unmoved)),
            free_after_s=free_after_s,
            left_over=left_over,
            num_ended=sum(board.last.ended.values()) - before,
        )


def _as_arrivals(requests: Sequence[KnownRequest]) -> tuple[list[Arrival], list[Sequence[int]]]:
    arrivals = [Arrival(0.0, len(each.prompt), each.params.max_tokens) for each in requests]
    return arrivals, [each.prompt for each in requests]


async def _load(
    client: Client,
    requests: Sequence[KnownRequest],
    rate: float,
    operating: asyncio.Task[None],
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Send the requests in turn, at random moments, while the operator works. Rounds share no cached prompts."""
    rng, tenant, began_s = random.Random("moves"), new_tenant(), client.clock.now_s()

    async def send(number: int) -> Outcome:
        round_, place = divmod(number, len(requests))
        message = requests[place].message(REQUEST_DEADLINE_S, f"{tenant}-{round_}")
        outcome = await client.send(message, began_s)
        outcome.number = number
        on_end(outcome)
        return outcome

    sent: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as tasks:
        for number in count():
            await asyncio.wait((operating,), timeout=rng.expovariate(rate))
            if operating.done():
                break
            sent.append(tasks.create_task(send(number)))
    return [each.result() for each in sent]


def moved_gaps(outcome: Outcome) -> list[MovedGap]:
    """Return the gap of each move that an answer outlived."""
    found = (_longest(outcome.times_s.get(move.index, ()), move.num_tokens - 1, move) for move in outcome.moves)
    return [gap for gap in found if gap is not None]


def gaps_beside(moved: Iterable[MovedGap], unmoved: Iterable[Sequence[float]]) -> list[MovedGap]:
    """Return the gaps that answers which never moved had where others did. `unmoved`: the times of their tokens.

    The time after a first token is not among them: the answer waits for a place to decode.
    """
    answers, found = [times_s[1:] for times_s in unmoved if len(times_s) > 1], list[MovedGap | None]()
    for gap in moved:
        under_way = (times_s for times_s in answers if times_s[0] <= gap.at_s < times_s[-1])
        found += [_longest(times_s, bisect_right(times_s, gap.at_s) - 1) for times_s in under_way]
    return [gap for gap in found if gap is not None]


def _longest(times_s: Sequence[float], place: int, move: Moved | None = None) -> MovedGap | None:
    """Return the longer of the gaps after token `place` and the next one; None where there is nothing to compare."""
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    there = range(max(0, place), min(len(gaps_s), place + 2))
    begin, end = max(0, there.start - _NEAR), there.stop + _NEAR
    near_s = [gap_s for at, gap_s in enumerate(gaps_s[begin:end], begin) if at not in there]
    if not there or not near_s:
        return None
    longest = max(there, key=lambda at: gaps_s[at])
    return MovedGap(times_s[longest], gaps_s[longest], gaps_s[there.start], fmean(near_s), move)


def over_allowed(gaps: Iterable[MovedGap]) -> Percentiles | None:
    """Return how the gaps compare with what is allowed. Where all tokens came at once, nothing is."""
    return percentiles(gap.gap_s / gap.allowed_s for gap in gaps if gap.allowed_s)
