"""The other pipeline stages begin steps in the order in which the last one computes them, and some of them ahead."""

from collections import deque
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from threading import Condition, Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import DeviceError
from pdserve.base.ids import PageId
from pdserve.engine.step import Chunk, Phase, StepPlan
from pdserve.executor.steps_ahead import StepsAhead
from pdserve.protocol.pooling import Pooling

KINDS = ("known", "sampled before", "copies", "vector")


def plan_of(number: int, kind: str) -> StepPlan:
    """Return a step of two chunks that says which one it is."""
    chunk = Chunk((number,), 0, (PageId(number),), ())
    match kind:
        case "sampled before":
            return StepPlan((chunk, replace(chunk, phase=Phase.DECODE, previous=0)))
        case "vector":
            return StepPlan((chunk, replace(chunk, pooling=Pooling("last"))))
        case "copies":
            return StepPlan((chunk, chunk), ((PageId(1), PageId(2)),))
        case _:
            return StepPlan((chunk, chunk))


class Stages:
    """The last stage, with steps of these kinds started, and what the others are told."""

    def __init__(self, *kinds: str) -> None:
        self.told: list[int] = []
        self.news = Condition()
        self.ahead = StepsAhead(self.tell)
        self.under_way: deque[StepPlan] = deque()
        for number, kind in enumerate(kinds, 1):
            self.start(plan_of(number, kind))

    def tell(self, plan: StepPlan) -> None:
        with self.news:
            self.told.append(plan.chunks[0].token_ids[0])
            self.news.notify()

    def wait_for(self, *numbers: int) -> None:
        """Wait until the others have been told of these steps."""
        with self.news:
            assert self.news.wait_for(lambda: self.told == [*numbers], 10.0), self.told

    def start(self, plan: StepPlan) -> None:
        self.under_way.append(plan)
        self.ahead.start(plan)

    def compute(self, *, in_halves: bool = False) -> int:
        """Begin the oldest step, whole or in halves; return its number."""
        given = self.under_way[0].chunks
        chunks = tuple([chunk if chunk.previous is None else replace(chunk, previous=None) for chunk in given])
        for part in (chunks[:1], chunks[1:]) if in_halves else (chunks,):
            self.ahead.begin(StepPlan(part))
        return given[0].token_ids[0]

    def end(self) -> None:
        self.under_way.popleft()
        self.ahead.end()


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=8))
def test_others_begin_steps_in_the_order_in_which_the_last_stage_computes_them(steps: Seq[tuple[str, bool]]) -> None:
    stages, computed = Stages(), list[int]()
    waiting = deque((plan_of(number, kind), is_halved) for number, (kind, is_halved) in enumerate(steps, 1))
    halved = deque(is_halved for _, is_halved in waiting)
    with suppress(DeviceError):
        while waiting or stages.under_way:
            while waiting and len(stages.under_way) < 2:
                stages.start(waiting.popleft()[0])
            in_halves = halved.popleft()
            number = stages.compute(in_halves=in_halves)
            computed += [number] * (1 + in_halves)
            stages.end()
    stages.ahead.close()
    assert stages.told[: len(computed)] == computed
    assert len(stages.told) <= len(computed) + 2


@pytest.mark.parametrize(
    ("first", "second", "is_ahead"),
    [
        ("known", "known", True),
        ("sampled before", "known", True),
        ("copies", "known", True),
        ("known", "vector", True),
        ("known", "sampled before", False),
        ("known", "copies", False),
        ("vector", "known", False),
    ],
)
def test_a_step_is_begun_ahead_only_where_all_of_it_is_known_and_the_one_before_is_not_computed_again(
    first: str, second: str, is_ahead: bool
) -> None:
    stages = Stages(first, second)
    stages.compute()
    stages.ahead.close()
    assert stages.told == [1, 2][: 1 + is_ahead]


def test_nothing_is_begun_ahead_of_a_step_that_is_computed_in_halves() -> None:
    stages = Stages("known", "known")
    stages.compute(in_halves=True)
    stages.ahead.close()
    assert stages.told == [1, 1]


def test_nothing_is_begun_ahead_of_a_step_whose_turn_has_come() -> None:
    stages = Stages("known", "copies")
    stages.compute()
    stages.end()
    stages.start(plan_of(3, "known"))
    stages.ahead.close()
    assert stages.told == [1]


@pytest.mark.parametrize("in_halves", [False, True])
def test_a_step_that_is_computed_again_when_others_have_begun_the_next_one_is_a_broken_device(in_halves: bool) -> None:
    stages = Stages("known", "known")
    stages.compute()
    stages.wait_for(1, 2)
    with pytest.raises(DeviceError):
        stages.compute(in_halves=in_halves)
    stages.ahead.close()


def test_a_step_that_is_started_while_one_is_computed_is_begun_ahead() -> None:
    stages = Stages("known")
    stages.compute()
    stages.start(plan_of(2, "known"))
    stages.wait_for(1, 2)
    stages.ahead.close()


@pytest.mark.parametrize("kind", ["vector", "known"])
def test_a_step_that_fails_is_computed_in_halves_before_one_that_follows_it(kind: str) -> None:
    stages = Stages("known")
    stages.compute()
    stages.compute(in_halves=True)
    stages.start(plan_of(2, kind))
    stages.ahead.close()
    assert stages.told == [1, 1, 1]


def test_a_step_that_is_started_while_a_half_of_one_is_told_waits() -> None:
    stages, before = Stages(), list[list[int]]()

    def tell(plan: StepPlan) -> None:
        if stages.told == [1] and plan.chunks[0].token_ids[0] == 1:
            stages.start(plan_of(2, "known"))
            stages.ahead._thread.submit(int).result()
            before.append([*stages.told])
        stages.tell(plan)

    stages.ahead = StepsAhead(tell)
    stages.start(plan_of(1, "known"))
    stages.compute()
    stages.compute(in_halves=True)
    stages.ahead.close()
    assert (before, stages.told) == ([[1]], [1, 1, 1])


def test_others_are_told_of_a_step_ahead_while_this_stage_computes() -> None:
    """A large step fills the socket to a stage that reads on only once this stage has computed."""
    stages, has_begun = Stages(), Event()

    def tell(plan: StepPlan) -> None:
        if plan.chunks[0].token_ids[0] == 1 or has_begun.wait(5.0):
            stages.tell(plan)

    stages.ahead = StepsAhead(tell)
    stages.start(plan_of(1, "known"))
    stages.start(plan_of(2, "known"))
    stages.compute()
    has_begun.set()
    stages.wait_for(1, 2)
    stages.ahead.close()
