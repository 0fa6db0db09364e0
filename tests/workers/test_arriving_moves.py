"""A continuation that moves waits at its target for one short step at most."""

from two_workers import FAR_S, PAGE_SIZE, ROUTER, Workers, alone, new_job

from pdserve.decode_worker.incoming import CUT_OVER_S
from pdserve.engine.sequence import Job
from pdserve.engine.step import StepPlan
from pdserve.worker.messages import Placed, Ticked

LONG = 3 * PAGE_SIZE  # a prompt that one step computes


def begun(*, attached: bool = True) -> tuple[Workers, Job]:
    """Return workers, and an answer that the first of them has begun."""
    workers, moving = Workers(depth=2), new_job(1, [5, 6, 7, 8, 9, 10], max_tokens=40)
    workers.start(moving)
    if attached:
        workers.lost.add(("s", "t"))
        workers.attach_again()
    workers.steps_of("s", 6)
    return workers, moving


def has_room(workers: Workers) -> bool:
    """Whether the target has offered pages."""
    return bool(workers.nodes["t"].core.incoming.awaits_move())


def prompt(workers: Workers, number: int = 2) -> Job:
    """Give the target a prompt of three pages, whole."""
    job = new_job(number, list(range(LONG)), max_tokens=4)
    workers.start(job, "t")
    workers.deliver_all()
    return job


def planned(workers: Workers) -> StepPlan:
    assert workers.plan("t")
    return workers.nodes["t"].steps[-1]


def finish(workers: Workers, *jobs: Job) -> None:
    workers.run()
    for job in jobs:
        assert workers.output(job) == alone(job)[0]
    workers.assert_nothing_held()


def test_it_is_offered_room_once_no_long_step_runs_and_decodes_on_meanwhile() -> None:
    workers, moving = begun()
    other = prompt(workers)
    assert len(planned(workers).chunks[0].token_ids) == LONG
    workers.move(moving)
    before = len(workers.output(moving))
    workers.steps_of("s", 8)
    assert not has_room(workers)
    assert len(workers.output(moving)) == before + 8
    workers.commit("t")
    assert has_room(workers), "it waits for no event but the step's end"
    finish(workers, moving, other)


def test_it_is_offered_room_at_once_beside_steps_that_only_decode() -> None:
    workers, moving = begun()
    other = prompt(workers)
    workers.step("t")
    planned(workers)
    workers.move(moving)
    workers.deliver("router", "router", "t")
    assert has_room(workers)
    finish(workers, moving, other)


def test_a_stream_that_opens_during_a_long_step_brings_no_offer() -> None:
    workers, moving = begun(attached=False)
    other = prompt(workers)
    planned(workers)
    workers.move(moving)
    workers.deliver_all()
    assert workers.attached == {("s", "t")}
    assert not has_room(workers)
    workers.commit("t")
    assert has_room(workers)
    finish(workers, moving, other)


def test_prompts_are_computed_page_by_page_while_it_may_come() -> None:
    workers, moving = begun()
    workers.move(moving)
    workers.deliver("router", "router", "t")
    assert has_room(workers)
    job = new_job(2, list(range(LONG)), max_tokens=4)
    workers.start(job, "t")
    workers.deliver("router", "router", "t")
    assert [len(chunk.token_ids) for chunk in planned(workers).chunks] == [PAGE_SIZE]
    workers.commit("t")
    workers.now_s = CUT_OVER_S + 0.1
    rest = [len(chunk.token_ids) for chunk in planned(workers).chunks]
    assert rest == [LONG - PAGE_SIZE], "copies that take long hold no prompt back"
    finish(workers, moving, job)


def test_the_first_step_that_it_is_in_is_a_short_one_too() -> None:
    workers, moving = begun()
    workers.move(moving)
    workers.steps_of("s", 8)
    assert workers.answers[moving.request_id, 0].worker == "t"
    assert not has_room(workers), "it has come, and nothing else may"
    job = prompt(workers)
    assert [len(chunk.token_ids) for chunk in planned(workers).chunks] == [1, PAGE_SIZE]
    workers.commit("t")
    assert [len(chunk.token_ids) for chunk in planned(workers).chunks] == [1, LONG - PAGE_SIZE]
    finish(workers, moving, job)


def test_the_next_step_is_not_planned_ahead_while_it_may_come() -> None:
    workers, moving = begun()
    other, core = prompt(workers), workers.nodes["t"].core
    workers.step("t")
    assert core.may_plan_ahead
    workers.move(moving)
    workers.deliver("router", "router", "t")
    assert not core.may_plan_ahead
    workers.steps_of("s", 8)
    assert workers.answers[moving.request_id, 0].worker == "t"
    assert core.may_plan_ahead
    finish(workers, moving, other)


def test_prompts_that_arrive_with_a_hand_off_hold_nothing_back() -> None:
    workers, _ = begun()
    job, source = new_job(2, list(range(LONG))), workers.nodes["s"].peer
    workers.queue("t", Placed(ROUTER, job, FAR_S, source))
    workers.deliver_all()
    workers.handle("t", Ticked(0.0))
    assert workers.nodes["t"].core.incoming.num_open == 1
    assert not has_room(workers)
