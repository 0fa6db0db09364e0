"""What the router knows of prompts that a worker computes in several steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_driver import Driver, placed_request

from pdserve.base.ids import PROTOCOL_VERSION, Attempt, AttemptKey, Incarnation, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.engine.step import Chunk, Phase, StepPlan, StepResult, work_of
from pdserve.perfmodel.curve import Step, attention_work
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.reports import Stage
from pdserve.protocol.sampling import SampledToken
from pdserve.router.placement.view import Share, WorkerView
from pdserve.router.requests.events import LinkId, LinkLost, Registration, StageReached, StepReported
from pdserve.router.wire import worker_events
from pdserve.worker.messages import Progress, RouterRef, StepCost
from pdserve.worker.wire import step_report

BUDGET = 512


def worker() -> WorkerView:
    layout = KvLayout("w", 1, 1, 8, 16, "float32")
    process = LinkId(1), WorkerId("p"), Incarnation(1), Role.PREFILL
    return WorkerView(Registration(*process, PROTOCOL_VERSION, True, "m", layout, 1000, 32, 10_000, "", BUDGET), 0.0)


def key(number: int) -> AttemptKey:
    return RequestId(number.to_bytes(16)), Attempt(0)


def assign(view: WorkerView, number: int, tokens: int, now_s: float = 0.0) -> None:
    view.assign(key(number), Share(0, tokens, attention_work(tokens, 0)), now_s)


def test_what_is_left_of_a_long_prompt_shrinks_with_each_step() -> None:
    view = worker()
    assign(view, 1, 1200)
    for done in (512, 1024):
        view.stepped(Step(512, attention_work(512, done - 512)), 0.1)
        assert view.pending_prefill_tokens == 1200 - done
        assert view.pending_prefill_work == attention_work(1200 - done, done)
        assert view.running.prefill_tokens == min(BUDGET, 1200 - done)
    view.prefilled(key(1))
    view.stepped(Step(176, attention_work(176, 1024)), 0.3)
    assert (view.pending_prefill_tokens, view.pending_prefill_work) == (0, 0)


def test_a_prompt_that_comes_during_a_step_is_not_part_of_it() -> None:
    view = worker()
    assign(view, 1, 100, now_s=1.0)
    assign(view, 2, 200, now_s=1.1)
    assert (view.running.prefill_tokens, view.running.since_s) == (100, 1.0)
    view.prefilled(key(1))
    view.stepped(Step(100, 10_000), 1.5)
    assert (view.running.prefill_tokens, view.running.since_s) == (200, 1.5)


def test_tokens_that_come_outside_of_a_step_leave_the_step_that_runs_as_it_is() -> None:
    d = Driver()
    link = d.attach("m0")
    running = d.arrive(prompt=range(100))
    d.tokens(link, running, 0, 9)
    d.arrive(prompt=range(50))
    began_s = d.now_s
    d.wait(0.3)
    d.tokens(link, running, 1, 8)
    view = d.core.workers.known(link)
    assert (view.running.prefill_tokens, view.running.since_s) == (50, began_s)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 3000)), max_size=30))
def test_other_routers_prompts_never_make_what_is_left_negative_nor_more_than_was_sent(
    events: list[tuple[int, int]],
) -> None:
    view, sent = worker(), 0
    for number, (tokens, foreign) in enumerate(events):
        assign(view, number, tokens)
        sent += tokens
        view.stepped(Step(foreign, foreign * foreign), 0.0)
        assert 0 < view.pending_prefill_tokens <= sent
        assert view.pending_prefill_work >= 0
    for number in range(len(events)):
        view.prefilled(key(number))
    view.stepped(Step(), 0.0)
    assert (view.pending_prefill_tokens, view.pending_prefill_work) == (0, 0)


def test_a_step_that_does_both_is_told_in_its_parts() -> None:
    decoding = tuple(Chunk([1], start, (), (), Phase.DECODE) for start in (70, 50))
    chunks = (Chunk([1] * 99, 300, (), ()), Chunk([1], 399, (), ()), *decoding)
    message = step_report((StepCost(work_of(StepPlan(chunks)), 0.25, 0.0),), (), (), (), 0.0)
    (event,) = worker_events(LinkId(1), message)
    assert event == StepReported(LinkId(1), message.step.deltas, Step(100, attention_work(100, 300), 2, 122), 0.25)


def test_a_step_is_told_with_its_guesses_and_those_that_were_kept() -> None:
    guessing = Chunk([1, 8, 9], 70, (), (), Phase.DECODE, num_drafts=2)
    plan = StepPlan((guessing, Chunk([1], 50, (), (), Phase.DECODE)))
    result = StepResult((((SampledToken(8), SampledToken(3)),), ((SampledToken(5),),)), 0.25)
    message = step_report((StepCost(work_of(plan, result), 0.25, 0.0),), (), (), (), 0.0)
    (event,) = worker_events(LinkId(1), message)
    assert isinstance(event, StepReported)
    assert event.step == Step(sequences=4, kv_tokens=71 + 72 + 73 + 51, guesses=2, kept_guesses=1)


def test_more_guesses_than_there_were_are_not_believed() -> None:
    message = step_report((StepCost(Step(sequences=2, guesses=9, kept_guesses=9), 0.25, 0.0),), (), (), (), 0.0)
    (event,) = worker_events(LinkId(1), message)
    assert isinstance(event, StepReported)
    assert (event.step.guesses, event.step.kept_guesses) == (1, 1)


def test_steps_that_are_told_together_come_before_the_stages_of_the_last_one() -> None:
    decoding, computing = Step(0, 0, 2, 122), Step(100, 10_000, 2, 124)
    costs = StepCost(decoding, 0.002, 5.0), StepCost(computing, 0.012, 5.012)
    done = Progress(RouterRef(1), AttemptKey(RequestId(bytes(16)), Attempt(0)), Stage.PREFILL_DONE, 5.012)
    early, stage, last = worker_events(LinkId(1), step_report(costs, (), (done,), (), 5.013))
    assert early == StepReported(LinkId(1), (), decoding, 0.002, age_s=0.013)
    assert isinstance(stage, StageReached)
    assert last == StepReported(LinkId(1), [], computing, 0.012, age_s=0.001)


@pytest.mark.parametrize(
    ("priority", "before"),
    [(-2, 512 + 1300), (-1, 512 + 700), (0, 512 + 300), (1, 512)],
    ids=["lowest", "low", "normal", "high"],
)
def test_before_a_prompt_come_those_begun_and_those_of_its_priority_or_a_higher_one(priority: int, before: int) -> None:
    view = worker()
    for number, (level, tokens) in enumerate([(0, 512), (-2, 600), (0, 300), (-1, 400)]):
        share = Share(0, tokens, attention_work(tokens, 0), priority=level)
        view.assign(key(number), share, 0.0)
    assert view.waiting_before(priority)[0] == before


def test_a_prompt_that_is_computed_in_part_is_not_overtaken() -> None:
    view = worker()
    assign(view, 1, 1200)
    view.stepped(Step(512, attention_work(512, 0)), 0.1)
    view.assign(key(2), Share(0, 100, 10_000, priority=5), 0.2)
    assert view.waiting_before(9)[0] == 1200 - 512 + 100 - 100
    view.stepped(Step(512, attention_work(512, 512)), 0.3)
    assert view.waiting_before(9)[0] == 1200 - 1024 + 100, "the next step holds both"


def test_the_prompt_computed_in_part_is_the_most_urgent_one_not_the_one_that_came_first() -> None:
    view = worker()
    assign(view, 1, 500)
    assign(view, 2, 20)
    view.assign(key(3), Share(0, 2000, attention_work(2000, 0), priority=1), 0.0)
    view.prefilled(key(1))
    view.stepped(Step(500, 250_000), 0.1)
    view.stepped(Step(512, attention_work(512, 0)), 0.2)
    assert view.pending_prefill_tokens == 20 + 2000 - 512


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(1, 2000), st.sampled_from(["add", "step", "drop"]))))
def test_no_order_of_prompts_loses_one_or_lets_a_wait_be_negative(events: list[tuple[int, int, str]]) -> None:
    view = worker()
    for number, (priority, tokens, action) in enumerate(events):
        match action:
            case "add":
                view.assign(key(number), Share(0, tokens, attention_work(tokens, 0), priority=priority), 0.0)
            case "step":
                view.stepped(Step(min(tokens, BUDGET), tokens), 0.0)
            case "drop" if view.shares:
                view.unassign(next(iter(view.shares)))
        waits = [view.waiting_before(each) for each in (2, 1, 0, -1)]
        assert waits == sorted(waits)
        assert 0 <= waits[0][0] <= waits[-1][0] == view.pending_prefill_tokens
    for each in tuple(view.shares):
        view.unassign(each)
    view.check_idle()


def test_a_decode_worker_that_goes_on_alone_awaits_no_prompt() -> None:
    d, prefill, decode, request = placed_request()
    d.stage(decode, request, Stage.COMMITTED)
    d.post(LinkLost(prefill, "died"))
    d.tokens(decode, request, 0, 5)
    assert d.core.workers.known(decode).num_arriving == 0
