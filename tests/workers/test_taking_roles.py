"""A worker takes another role while it serves, and workers that hand off to each other never wait for each other."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from wired_cores import MAX_MODEL_LEN, PAGE_SIZE, ROUTER, WiredCores, core_worker, job, wanted
from worker_settings import built, settings_of_tiny

from pdserve.base.errors import ConfigError, ProtocolError
from pdserve.base.roles import Role
from pdserve.engine.kvcache import Room
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.protocol.reports import Failure, Stage
from pdserve.worker.admission import Roles
from pdserve.worker.messages import Cancelled, Failed, Placed, Progress, RoleGiven, RoleTaken

LONGEST = MAX_MODEL_LEN // PAGE_SIZE
NUM_PAGES = 2 * LONGEST + 4
STEPS = {Role.PREFILL: 32, Role.DECODE: 4, Role.MIXED: 8}


def mixed_cores() -> WiredCores:
    return WiredCores({name: core_worker(name, NUM_PAGES, role=Role.MIXED) for name in ("a", "b")})


def crowd(cores: WiredCores, rng: random.Random) -> list[Job]:
    """Place more prompts on two workers, each to be handed off to the other, than both have pages for."""
    jobs = [job(number, rng.choice((9, 21, 30)), max_tokens=rng.choice((2, 8))) for number in range(24)]
    for number, each in enumerate(jobs):
        source, target = ("a", "b") if number % 2 else ("b", "a")
        cores.place(each, source, target)
    return jobs


@pytest.mark.parametrize("seed", range(30))
def test_mixed_workers_that_hand_off_to_each_other_finish_everything(seed: int) -> None:
    rng = random.Random(seed)
    cores = mixed_cores()
    jobs = crowd(cores, rng)
    cores.run(rng)
    assert not cores.failed
    for each in jobs:
        assert cores.output(each) == wanted(each)
    cores.assert_nothing_held()


def without_room_for_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep room for the longest prompt beside prompts without a grant alone, as if nothing arrived."""
    monkeypatch.setattr(Room, "for_grants", property(lambda room: room._pool.num_pages))
    monkeypatch.setattr(Room, "num_granted", property(lambda _: 0))


def without_room_to_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts that wait for grants take all but the room of the longest prompt, so that nothing can be granted."""
    monkeypatch.setattr(Roles, "num_kept", lambda _roles, _awaited: 0)


@pytest.mark.parametrize("plant", [without_room_for_grants, without_room_to_grant])
def test_without_either_part_of_the_rule_they_wait_for_each_other_for_ever(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(gets_stuck(random.Random(seed)) for seed in range(100))


def gets_stuck(rng: random.Random) -> bool:
    cores = mixed_cores()
    jobs = crowd(cores, rng)
    cores.run(rng)
    return any((each.key, 0) not in cores.finished for each in jobs)


# ---- which role a worker has


def test_a_worker_follows_a_role_of_a_greater_epoch_alone_and_reports_it_at_once() -> None:
    worker = core_worker("w", NUM_PAGES, role=Role.PREFILL, step_tokens=STEPS)
    assert worker.core.handle(RoleGiven(Role.DECODE, 1), 0.0) == [RoleTaken(Role.DECODE, 1, STEPS[Role.DECODE])]
    assert worker.core.handle(RoleGiven(Role.MIXED, 1), 0.0) == [], "another router asked at the same moment"
    assert (worker.core.load().role, worker.core.load().role_epoch) == (Role.DECODE, 1)
    assert worker.core.handle(RoleGiven(Role.MIXED, 5), 0.0) == [RoleTaken(Role.MIXED, 5, STEPS[Role.MIXED])]
    assert worker.core.handle(RoleGiven(Role.DECODE, 4), 0.0) == [], "late news"


def test_a_role_sets_how_many_tokens_a_step_computes() -> None:
    worker = core_worker("w", NUM_PAGES, role=Role.PREFILL, step_tokens=STEPS)
    worker.core.handle(Placed(ROUTER, job(1, 36), 1e9), 0.0)
    plan = worker.core.plan(0.0)
    assert plan is not None
    assert plan.num_tokens == STEPS[Role.PREFILL]
    worker.core.handle(RoleGiven(Role.DECODE, 1), 0.0)
    worker.core.commit(plan, worker.runner.run(plan), 0.0)
    plan = worker.core.plan(0.0)
    assert plan is not None
    assert plan.num_tokens == STEPS[Role.DECODE]


def test_what_still_decodes_on_a_prefill_worker_is_given_short_steps() -> None:
    worker = core_worker("w", NUM_PAGES, role=Role.DECODE, step_tokens=STEPS)
    worker.core.handle(Placed(ROUTER, job(1, 3, max_tokens=8), 1e9), 0.0)
    first = worker.core.plan(0.0)
    assert first is not None
    worker.core.commit(first, worker.runner.run(first), 0.0)
    worker.core.handle(RoleGiven(Role.PREFILL, 1), 0.0)
    worker.core.handle(Placed(ROUTER, job(2, 36), 1e9), 0.0)
    plan = worker.core.plan(0.0)
    assert plan is not None
    assert plan.num_tokens == STEPS[Role.DECODE]


def test_a_pool_too_small_for_two_of_the_longest_does_not_become_mixed() -> None:
    worker = core_worker("w", 2 * LONGEST - 1, role=Role.DECODE)
    with pytest.raises(ProtocolError, match="19 pages are less than two of the longest sequences need, 20, as mixed"):
        worker.core.handle(RoleGiven(Role.MIXED, 1), 0.0)
    assert worker.core.load().role is Role.DECODE


def test_such_a_pool_computes_prompts_as_it_may_from_the_start() -> None:
    worker = core_worker("w", 2 * LONGEST - 1, role=Role.DECODE)
    worker.core.handle(RoleGiven(Role.PREFILL, 1), 0.0)
    assert worker.core.load().role is Role.PREFILL


def test_a_mixed_worker_that_becomes_a_prefill_worker_starts_what_waited_for_the_room_to_grant() -> None:
    worker = core_worker("w", 3 * LONGEST + 2, role=Role.MIXED)
    other = core_worker("o", NUM_PAGES).peer
    jobs = [job(number, num_tokens, max_tokens=2) for number, num_tokens in enumerate((38, 38, 20))]
    for each in jobs:
        worker.core.handle(Placed(ROUTER, each, 1e9, target=other, target_address="o"), 0.0)
    worker.core.handle(Cancelled(jobs[0].request_id, jobs[0].attempt), 0.0)
    assert len(worker.scheduler.waiting) == 1, "beside the second, the third would take the room to grant the longest"
    worker.core.handle(RoleGiven(Role.PREFILL, 1), 0.0)
    assert len(worker.scheduler.waiting) == 2


@pytest.mark.parametrize("role", list(Role))
def test_a_mixed_worker_alone_does_not_start_with_such_a_pool(role: Role, tmp_path: Path) -> None:
    config = settings_of_tiny(tmp_path, num_pages=7, role=role)
    try:
        built(config)
    except ConfigError as error:
        assert role is Role.MIXED
        assert str(error).startswith("role: 7 pages are less than two of the longest sequences need, 8")  # noqa: PT017
    else:
        assert role is not Role.MIXED


# ---- what was taken in, and what comes late


def given_grants(num_tokens: int, count: int) -> tuple[WiredCores, list[Job]]:
    """Return a sender and a decode worker that has granted pages to some of its prompts, none of which has landed."""
    cores = WiredCores({"s": core_worker("s", 60, role=Role.PREFILL), "d": core_worker("d", NUM_PAGES)})
    jobs = [job(number, num_tokens) for number in range(count)]
    cores.nodes["d"].core.handle(doors.SenderAttached(cores.nodes["s"].peer), 0.0)
    cores.attached.add(("s", "d"))
    for each in jobs:
        cores.place(each, "s", "d")
    for _ in jobs:
        cores.deliver("router", "router", "d")
    return cores, jobs


def test_a_decode_worker_computes_prompts_to_hand_off_once_the_room_for_them_is_free() -> None:
    cores, jobs = given_grants(30, 3)
    decode = cores.nodes["d"].core
    assert decode.load().pages_granted > NUM_PAGES - LONGEST, "or it need not wait"
    assert decode.handle(RoleGiven(Role.PREFILL, 1), 0.0) == []
    assert decode.load().role is Role.DECODE
    cores.run(random.Random(0))
    assert cores.roles == [("d", RoleTaken(Role.PREFILL, 1, 64))]
    assert [cores.output(each) for each in jobs] == [wanted(each) for each in jobs]
    cores.assert_nothing_held()


def test_while_it_waits_for_that_room_it_grants_nothing_that_would_take_it() -> None:
    cores, _ = given_grants(30, 3)
    decode, late = cores.nodes["d"].core, job(9, 4)
    decode.handle(RoleGiven(Role.PREFILL, 1), 0.0)
    commands = decode.handle(Placed(ROUTER, late, 1e9, source=cores.nodes["s"].peer), 0.0)
    assert not any(isinstance(command, doors.ToSender) for command in commands)
    assert decode.load().pages_free > 1, "or it could not have granted it anyway"


def test_a_decode_worker_takes_a_prompt_to_hand_off_from_a_router_that_does_not_know_yet_if_it_has_room() -> None:
    cores = WiredCores({"w": core_worker("w", NUM_PAGES, role=Role.PREFILL), "d": core_worker("d", NUM_PAGES)})
    cores.nodes["w"].core.handle(RoleGiven(Role.DECODE, 1), 0.0)
    each = job(1, 30)
    cores.place(each, "w", "d")
    cores.run(random.Random(0))
    assert cores.output(each) == wanted(each)


def test_a_decode_worker_without_room_refuses_prompts_to_hand_off() -> None:
    cores, _ = given_grants(30, 3)
    to_hand_off = Placed(ROUTER, job(9, 4), 1e9, target=cores.nodes["s"].peer, target_address="s")
    (failed,) = cores.nodes["d"].core.handle(to_hand_off, 0.0)
    assert isinstance(failed, Failed)
    assert failed.code is Failure.OVERLOADED
    assert "it decodes" in failed.reason


def test_a_worker_that_became_a_prefill_worker_serves_what_another_router_hands_to_it() -> None:
    cores = WiredCores({"s": core_worker("s", 60, role=Role.PREFILL), "d": core_worker("d", NUM_PAGES)})
    early, late = job(1, 30), job(2, 30)
    cores.place(early, "s", "d")
    cores.queue("d", RoleGiven(Role.PREFILL, 1))
    cores.place(late, "s", "d")
    cores.run(random.Random(0))
    assert not cores.failed
    assert [cores.output(each) for each in (early, late)] == [wanted(early), wanted(late)]
    cores.assert_nothing_held()


def test_a_prefill_worker_whose_prompts_wait_for_grants_refuses_a_hand_off_that_has_no_room_beside_them() -> None:
    worker = core_worker("w", NUM_PAGES, role=Role.PREFILL)
    other = core_worker("o", NUM_PAGES).peer
    worker.core.handle(Placed(ROUTER, job(1, 38), 1e9, target=other, target_address="o"), 0.0)
    commands = worker.core.handle(Placed(ROUTER, job(2, 30), 1e9, source=other), 0.0)
    assert [command.code for command in commands if isinstance(command, Failed)] == [Failure.OVERLOADED]
    commands = worker.core.handle(Placed(ROUTER, job(3, 12), 1e9, source=other), 0.0)
    assert [command.stage for command in commands if isinstance(command, Progress)] == [Stage.GRANTED]


# ---- a busy worker of both pools


def test_prompts_that_wait_for_a_step_do_not_keep_a_mixed_worker_from_granting() -> None:
    worker = core_worker("w", 10 * LONGEST, role=Role.MIXED)
    for number in range(4):
        worker.core.handle(Placed(ROUTER, job(number, 36), 1e9), 0.0)
    assert worker.core.load().num_waiting == 4
    arriving = Placed(ROUTER, job(9, 30), 1e9, source=core_worker("o", NUM_PAGES).peer)
    stages = [command.stage for command in worker.core.handle(arriving, 0.0) if isinstance(command, Progress)]
    assert stages == [Stage.GRANTED]


def test_a_grant_leaves_the_pages_that_an_earlier_prompt_waits_for() -> None:
    worker = core_worker("w", LONGEST + 4, role=Role.DECODE)
    worker.core.handle(Placed(ROUTER, job(1, 36), 1e9), 0.0)
    arriving = Placed(ROUTER, job(9, 20), 1e9, source=core_worker("o", NUM_PAGES).peer)
    assert worker.core.handle(arriving, 0.0) == []
    assert worker.core.load().pages_free == LONGEST + 4, "or it could not have granted it anyway"
