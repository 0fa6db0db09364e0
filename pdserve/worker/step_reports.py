"""Decides when what steps bring is reported to a router, and what goes together.

A message costs a router a fixed time, and so does each sequence's entry in it. So tokens of several short steps go into
one message: with the first step that ends WINDOW_S after they last went, and at most LATEST_S late. What steps over
WINDOW_S bring is sent as they end. A sequence's first and last tokens, tokens of a hand-off, stages and what a prompt's
step cost are always sent at once.
"""

from collections.abc import Iterable
from math import inf

from pdserve.kvtransfer.session import HandoffKey
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker import wire
from pdserve.worker.messages import Progress, PromptScored, StepCost, Tokens

WINDOW_S = 0.016  # sixty reports a second: as many changes as a screen shows
LATEST_S = 0.02  # that a token waits for the step behind it


class StepReports:
    """What one router is told of steps. Invariant: each sequence's tokens go once and in order."""

    def __init__(self, *, each_at_once: bool) -> None:
        """`each_at_once`: the router wants to hear of each step when it ends."""
        self._each_at_once = each_at_once
        self._tokens: dict[tuple[HandoffKey, int], list[Tokens]] = {}  # held, by sequence
        self._costs: list[StepCost] = []  # of steps not reported yet, oldest first
        self._sent_s = -inf  # when all that was held was last sent
        self._held_s = inf  # since when the oldest is held

    @property
    def due_s(self) -> float:
        """When what is held has to go; inf: nothing is held."""
        return self._held_s + LATEST_S

    def report(
        self, reports: Iterable[Tokens | Progress | PromptScored], cost: StepCost | None, now_s: float
    ) -> link.AttachRequest | None:
        """Return the message that goes now, if any. `cost`: of the step that brought the reports; None: no step did."""
        at_once: dict[tuple[HandoffKey, int], None] = {}
        stages: list[Progress] = []
        prompts: list[PromptScored] = []
        for report in reports:
            if isinstance(report, Tokens):
                name = report.key, report.index
                self._tokens.setdefault(name, []).append(report)
                if report.finish is not None or not report.position or cost is None:
                    at_once[name] = None
            elif isinstance(report, Progress):
                stages.append(report)
            else:
                prompts.append(report)
        is_urgent = bool(at_once or stages or prompts)
        if cost is not None:
            self._costs.append(cost)
            is_urgent |= cost.step.prefill_tokens > 0
            if self._each_at_once or max(now_s - self._sent_s, cost.elapsed_s) >= WINDOW_S:
                return self._message(self._take_all(now_s), stages, prompts, now_s)
        message = None
        if is_urgent:
            message = self._message([self._tokens.pop(name) for name in at_once], stages, prompts, now_s)
        if not self._tokens and not self._costs:
            self._held_s = inf
        elif self._held_s == inf:
            self._held_s = now_s
        return message

    def rest(self, now_s: float) -> link.AttachRequest | None:
        """Return a message with all that is held, if anything is."""
        if not self._tokens and not self._costs:
            return None
        return self._message(self._take_all(now_s), (), (), now_s)

    def _take_all(self, now_s: float) -> list[list[Tokens]]:
        tokens = list(self._tokens.values())
        self._tokens.clear()
        self._sent_s, self._held_s = now_s, inf
        return tokens

    def _message(
        self, tokens: list[list[Tokens]], stages: Iterable[Progress], prompts: Iterable[PromptScored], now_s: float
    ) -> link.AttachRequest:
        costs, self._costs = self._costs, []
        return wire.step_report(costs, tokens, stages, prompts, now_s)
