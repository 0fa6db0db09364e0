"""Tokens of short steps go together, none late, and each once; a router that wants each step is told of each."""

from collections import defaultdict
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import Attempt, AttemptKey, RequestId
from pdserve.engine.sequence import Finish
from pdserve.engine.step import StepPlan, StepResult
from pdserve.observe.metrics import ACCEPTED_TOKENS, DRAFT_TOKENS, DRAFTS, ITL, SAMPLED_TOKENS, Distribution
from pdserve.perfmodel.curve import Step
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.drafts import DraftSource, Verified
from pdserve.protocol.link import SOURCES
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import SampledToken, TokenLogprobs
from pdserve.worker.messages import Progress, RouterRef, StepCost, Tokens
from pdserve.worker.reporting import LATEST_S, WINDOW_S, Reporter, StepReports, Steps

if TYPE_CHECKING:
    from pdserve.worker.link import Links

ROUTER = RouterRef(1)
KEYS = [AttemptKey(RequestId(bytes([number]) * 16), Attempt(0)) for number in range(4)]
SHORT_S = WINDOW_S / 4


def token(number: int, position: int, finish: Finish | None = None, logprobs: TokenLogprobs | None = None) -> Tokens:
    return Tokens(ROUTER, KEYS[number], 0, position, (SampledToken(100 * number + position, logprobs),), finish)


def decoded(*numbers: int, prefill_tokens: int = 0, elapsed_s: float = SHORT_S) -> StepCost:
    """Return the cost of a step that is told from others by its KV tokens."""
    return StepCost(Step(prefill_tokens, prefill_tokens, len(numbers), 7 * sum(numbers)), elapsed_s, 0.0)


def gained(message: link.AttachRequest | None) -> list[tuple[int, list[int]]]:
    """Return the first position and the tokens of each sequence in a message."""
    assert message is not None
    return [(delta.position, list(delta.token_ids)) for delta in message.step.deltas]


def running() -> StepReports:
    """Return reports of a worker whose last ones went at 0.0."""
    reports = StepReports(each_at_once=False)
    assert gained(reports.report([token(1, 1)], decoded(1), 0.0)) == [(1, [101])]
    return reports


def test_tokens_of_short_steps_go_with_the_step_that_ends_a_window_after_the_last() -> None:
    reports = running()
    for position in (2, 3, 4):
        assert reports.report([token(1, position)], decoded(1), (position - 1) * SHORT_S) is None
        assert reports.due_s == SHORT_S + LATEST_S
    message = reports.report([token(1, 5)], decoded(1), WINDOW_S)
    assert gained(message) == [(2, [102, 103, 104, 105])]
    assert message is not None
    assert len(message.step.costs) == 4
    assert reports.due_s == inf


def test_what_waits_goes_when_it_is_due_though_no_step_ends() -> None:
    reports = running()
    assert reports.report([token(1, 2)], decoded(1), SHORT_S) is None
    message = reports.rest(reports.due_s)
    assert gained(message) == [(2, [102])]
    assert reports.rest(1.0) is None


@pytest.mark.parametrize("step_s", [WINDOW_S, 1.1 * LATEST_S, 2 * WINDOW_S])
def test_what_a_step_over_a_window_brings_goes_as_it_ends_also_after_one_that_was_short(step_s: float) -> None:
    reports, now_s = running(), 0.0
    for position, elapsed_s in enumerate([step_s, 0.9 * WINDOW_S, step_s, step_s, step_s], 2):
        if reports.due_s < now_s + elapsed_s:
            assert gained(reports.rest(reports.due_s)) == [(position - 1, [99 + position])]
        now_s += elapsed_s
        message = reports.report([token(1, position)], decoded(1, elapsed_s=elapsed_s), now_s)
        assert (message is None) == (elapsed_s < WINDOW_S)
    assert reports.due_s == inf


@pytest.mark.parametrize(
    ("position", "finish"), [(0, None), (3, Finish.STOP), (3, Finish.LENGTH)], ids=["first", "stop", "length"]
)
def test_the_first_and_the_last_token_wait_for_nothing_and_take_only_their_own_along(
    position: int, finish: Finish | None
) -> None:
    reports = running()
    assert reports.report([token(1, 2), token(2, 2)] if position else [token(1, 2)], decoded(1, 2), SHORT_S) is None
    message = reports.report([token(1, 3), token(2, position, finish)], decoded(1, 2), 2 * SHORT_S)
    assert gained(message) == [(2, [202, 203]) if position else (0, [200])]
    assert message is not None
    assert bool(message.step.deltas[0].finish_reason) == (finish is not None)
    assert gained(reports.rest(3 * SHORT_S)) == [(2, [102, 103])]


def test_what_a_prompts_step_cost_is_told_at_once_and_others_tokens_wait_on() -> None:
    reports = running()
    assert reports.report([token(1, 2)], decoded(1), SHORT_S) is None
    message = reports.report([token(1, 3)], decoded(1, prefill_tokens=50), 2 * SHORT_S)
    assert gained(message) == []
    assert message is not None
    assert [each.prefill_tokens for each in message.step.costs] == [0, 50]
    assert gained(reports.rest(3 * SHORT_S)) == [(2, [102, 103])]


def test_a_stage_goes_at_once_and_what_came_without_a_step_too() -> None:
    reports = running()
    assert reports.report([token(1, 2)], decoded(1), SHORT_S) is None
    committed = Progress(ROUTER, KEYS[2], Stage.COMMITTED, SHORT_S)
    message = reports.report([committed, token(2, 4), token(2, 5)], None, 2 * SHORT_S)
    assert gained(message) == [(4, [204, 205])]
    assert message is not None
    assert [each.stage for each in message.step.progress] == [link.STAGE_COMMITTED]
    assert gained(reports.rest(3 * SHORT_S)) == [(2, [102])]


def test_a_router_that_wants_each_step_is_told_of_each() -> None:
    reports = StepReports(each_at_once=True)
    for position in range(1, 5):
        message = reports.report([token(1, position)], decoded(1), position * SHORT_S)
        assert gained(message) == [(position, [100 + position])]


def test_guesses_of_steps_that_go_together_are_told_step_by_step() -> None:
    reports = running()
    for position, verified in (
        (2, Verified(DraftSource.SUFFIX, 4, 0)),
        (3, None),
        (4, Verified(DraftSource.MTP, 2, 0)),
    ):
        told = replace(token(1, position), verified=verified)
        assert reports.report([told], decoded(1), position * SHORT_S / 2) is None
    message = reports.rest(WINDOW_S)
    assert message is not None
    (delta,) = message.step.deltas
    assert [(SOURCES[each.source], each.num_draft_tokens) for each in delta.drafts] == [
        (DraftSource.SUFFIX, 4),
        (DraftSource.MTP, 2),
    ]


class ToOne:
    """Takes what is sent to one router."""

    attached = (ROUTER,)

    def __init__(self) -> None:
        self.sent: list[link.AttachRequest] = []

    def wants_each_step(self, router: RouterRef) -> bool:
        return True

    def send(self, router: RouterRef, message: link.AttachRequest) -> None:
        self.sent.append(message)


def test_guesses_of_reports_are_in_the_workers_metrics_and_on_the_wire() -> None:
    links = ToOne()
    reporter = Reporter(cast("Links", links), VirtualClock())
    told = [replace(token(number, 2), verified=Verified(DraftSource.NGRAM, 4, number)) for number in (1, 2)]
    reporter.send([*told, token(3, 2)], (StepPlan(()), StepResult((), SHORT_S)))
    counts = {sample.metric: sample.amount for sample in reporter.steps.samples("m", DraftSource.NGRAM)}
    assert (counts[DRAFTS], counts[DRAFT_TOKENS], counts[ACCEPTED_TOKENS]) == (2, 8, 3)
    (message,) = links.sent
    drafts = [each for delta in message.step.deltas for each in delta.drafts]
    assert [(each.num_draft_tokens, each.num_accepted_tokens) for each in drafts] == [(4, 1), (4, 2)]


def test_log_probabilities_stay_beside_their_tokens() -> None:
    reports = running()
    for position in (2, 3):
        logprobs = TokenLogprobs(-float(position), ())
        assert reports.report([token(2, position, None, logprobs)], decoded(2), position * SHORT_S / 2) is None
    message = reports.rest(WINDOW_S)
    assert gained(message) == [(2, [202, 203])]
    assert message is not None
    assert [each.chosen for each in message.step.deltas[0].logprobs] == [-2.0, -3.0]


@given(
    st.lists(
        st.tuples(
            st.floats(1e-4, 0.05),  # until the step ends
            st.sets(st.integers(0, 3)),  # which sequences gain a token
            st.sets(st.integers(0, 3)),  # which of them end
            st.booleans(),  # whether a prompt was computed, too
        ),
        max_size=60,
    )
)
def test_each_token_and_each_cost_goes_once_in_order_and_in_time(
    steps: list[tuple[float, set[int], set[int], bool]],
) -> None:
    reports = StepReports(each_at_once=False)
    now_s, positions = 0.0, dict.fromkeys(range(4), 0)
    came_s: dict[tuple[bytes, int], float] = {}
    sent: defaultdict[bytes, list[int]] = defaultdict(list)
    kv_tokens: list[int] = []

    def take(message: link.AttachRequest | None, at_s: float) -> None:
        for delta in message.step.deltas if message is not None else ():
            assert delta.position == len(sent[delta.request_id])
            sent[delta.request_id] += delta.token_ids
            assert all(
                at_s <= came_s[delta.request_id, delta.position + number] + LATEST_S + 1e-9
                for number in range(len(delta.token_ids))
            )
        kv_tokens.extend(cost.decode_kv_tokens for cost in (message.step.costs if message is not None else ()))

    for number, (elapsed_s, gaining, ending, has_prompt) in enumerate(steps, 1):
        while reports.due_s < now_s + elapsed_s:
            due_s = reports.due_s
            take(reports.rest(due_s), due_s)
        now_s += elapsed_s
        brought: list[Tokens] = []
        for each in gaining:
            finish = Finish.LENGTH if each in ending else None
            brought.append(token(each, positions[each], finish))
            came_s[KEYS[each].request_id, positions[each]] = now_s
            positions[each] += 1
        take(reports.report(brought, StepCost(Step(int(has_prompt), 0, 1, number), elapsed_s, now_s), now_s), now_s)
        for each in gaining & ending:
            assert len(sent[KEYS[each].request_id]) == positions[each], "an end waits for nothing"
    take(reports.rest(now_s), now_s)
    assert {each: len(sent[KEYS[each].request_id]) for each in range(4)} == positions
    assert kv_tokens == list(range(1, len(steps) + 1))


def test_each_sequence_waits_once_for_a_step_however_many_guesses_are_computed_for_it() -> None:
    steps = Steps()
    steps.note(Step(sequences=7, kv_tokens=70, guesses=4, kept_guesses=2), 0.5, 5)
    shown = {sample.metric: sample.amount for sample in steps.samples("m", None)}
    gaps = shown[ITL]
    assert isinstance(gaps, Distribution)
    assert (gaps.count, gaps.total, shown[SAMPLED_TOKENS]) == (3, 1.5, 5)
