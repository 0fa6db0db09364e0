"""Counts what clients ask a router for, and what became of it. Pure.

Invariant: each request is counted once when it arrives, once in `prompts` when it is first placed or ends unplaced, and
once when it ends.
"""

from collections import Counter

from pdserve.demand import NUM_BANDS, Demand, band_of
from pdserve.errors import Status
from pdserve.router.commands import Finished, Refused
from pdserve.router.request import Request
from pdserve.values import value


@value
class Verdict:
    """Which objectives a request met. One that was not asked for is met unless the request was refused."""

    ttft: bool
    tpot: bool


_MISSED = Verdict(ttft=False, tpot=False)


def judge(slo_s: tuple[float | None, float | None], outcome: Finished | Refused) -> Verdict | None:
    """Judge an end by the objectives for TTFT and TPOT; None without objectives, or where the client left."""
    ttft_s, tpot_s = slo_s
    if ttft_s is None and tpot_s is None:
        return None
    if isinstance(outcome, Refused):
        return None if outcome.status is Status.CANCELLED else _MISSED
    ledger = outcome.ledger
    return Verdict(
        ttft=ttft_s is None or ledger.ttft_ms <= ttft_s * 1e3, tpot=tpot_s is None or ledger.tpot_ms <= tpot_s * 1e3
    )


class DemandCounts:
    """Demand since the router's start."""

    def __init__(self) -> None:
        self._sums = Counter[str]()  # by the fields of Demand
        self._prompts, self._answers = [0] * NUM_BANDS, [0] * NUM_BANDS

    def arrive(self, request: Request) -> None:
        self._sums["num_requests"] += 1
        self._sums["prompt_tokens"] += request.num_tokens

    def place(self, request: Request, cached_tokens: int) -> None:
        """Count a request that is placed for the first time, and so many tokens of its prompt as not computed."""
        self._sums["cached_tokens"] += cached_tokens
        self._prompts[band_of(request.num_tokens - cached_tokens)] += 1

    def end(self, request: Request, outcome: Finished | Refused) -> None:
        if not request.is_admitted:
            self._prompts[band_of(request.num_tokens)] += 1
        for sequence in request.sequences:
            num_tokens = len(sequence.token_ids)
            self._sums["answer_tokens"] += num_tokens
            if isinstance(outcome, Finished):
                self._answers[band_of(num_tokens)] += 1
        verdict = judge(request.slo_s, outcome)
        if verdict is not None:
            self._sums["num_judged"] += 1
            self._sums["num_within_ttft"] += verdict.ttft
            self._sums["num_within_tpot"] += verdict.tpot
            self._sums["num_within_both"] += verdict.ttft and verdict.tpot

    def counted(self) -> Demand:
        return Demand(prompts=tuple(self._prompts), answers=tuple(self._answers), **self._sums)
