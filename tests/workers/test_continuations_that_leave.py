"""A running continuation moves: its client gets every token once, whatever goes wrong, and every page comes back."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joined_cores import MOST_DRAFTS, attentive, guessing
from two_workers import FAR_S, PAGE_SIZE, ROUTER, Workers, alone, new_job

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, AttemptKey
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Withdrawn
from pdserve.protocol.reports import Failure, Stage
from pdserve.worker.messages import Cancelled, Failed, MoveAsked, Placed, Progress, RouterLost, Ticked, Tokens

PROMPT = [5, 6, 7, 8, 9, 10]


def running(job: Job, num_tokens: int = 6, depth: int = 1, most_drafts: int = 0, **num_pages: int) -> Workers:
    """Return workers, the first of which has sampled so many tokens of each continuation."""
    new_runner = guessing if most_drafts else attentive
    workers = Workers(None, {"s": 64, "t": 64, **num_pages}, depth, new_runner, most_drafts)
    workers.start(job)
    while len(workers.output(job, job.indices[-1])) < num_tokens:
        workers.steps_of("s", 1)
    return workers


def moving(num_tokens: int = 6, **num_pages: int) -> tuple[Workers, Job, AttemptKey]:
    """Return workers, the first of which is asked to hand a continuation over; its request; and the move's name."""
    job = new_job(1, PROMPT, max_tokens=40)
    workers = running(job, num_tokens, **num_pages)
    return workers, job, workers.move(job)


def until(workers: Workers, is_so: Callable[[], bool], source: str = "s") -> None:
    """Let things happen one by one, with a step now and then, until something is so."""
    for _ in range(400):
        for name in list(workers.streams):
            if is_so():
                return
            workers.deliver(*name)
        workers.step(source)
    raise AssertionError("it never is")


def until_committed(workers: Workers) -> None:
    """Let a move go on until its commit has left and nobody has read it."""
    until(workers, lambda: bool(workers.committed))


def failures(workers: Workers, worker: str) -> list[tuple[int, Failure]]:
    return [
        (each.key.attempt, each.code) for who, each in workers.reports if isinstance(each, Failed) and who == worker
    ]


def positions(workers: Workers, worker: str) -> list[int]:
    return [each.position for who, each in workers.reports if isinstance(each, Tokens) and who == worker]


def finish(workers: Workers, job: Job) -> None:
    """Let all that is left happen: the answer is that of one engine, and nothing is held."""
    workers.run()
    wanted = alone(job)
    for index in job.indices:
        assert workers.output(job, index) == wanted[index]
    workers.assert_nothing_held()


# ---- a move that succeeds


def test_it_decodes_on_until_all_full_pages_have_landed() -> None:
    workers, job, _ = moving()
    for name in ("router", "hand-offs", "answers", "router"):
        for source, target in (("router", "s"), ("router", "t"), ("s", "t"), ("t", "s")):
            workers.deliver(name, source, target)
    assert workers.streams["copies", "s", "t"]
    before = len(workers.output(job))
    for _ in range(3):
        workers.step("s")
    assert len(workers.output(job)) == before + 3, "a copy under way stops nobody"
    workers.deliver("copies", "s", "t")
    workers.deliver("copies", "s", "t")
    assert workers.nodes["s"].core.plan(0.0) is None, "it is held for its last page"
    finish(workers, job)


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"min_tokens": 20},
        {"logprobs": 1},
        {"logprobs": 2, "frequency_penalty": 0.1, "min_tokens": 9},
        {"repetition_penalty": 1.2},
        {"temperature": 0.7},
    ],
)
def test_the_next_token_is_that_of_an_answer_that_stays(params: dict[str, float]) -> None:
    job = new_job(1, PROMPT, max_tokens=30, **params)
    workers = running(job, depth=2)
    workers.move(job)
    workers.steps_of("s", 10)
    workers.steps_of("t", 3)
    workers.move(job, target="s")  # and back: it has what came with it, too
    workers.steps_of("t", 10)
    assert workers.answers[job.request_id, 0].attempt == 2
    finish(workers, job)


def test_a_stop_token_ends_it_where_it_has_moved() -> None:
    stop = alone(new_job(1, PROMPT, max_tokens=40))[0][20].token_id
    job = new_job(1, PROMPT, max_tokens=40, stop_token_ids=(stop,))
    workers = running(job)
    workers.move(job)
    finish(workers, job)
    assert workers.answers[job.request_id, 0].worker == "t"


def test_continuations_that_share_their_prompts_pages_move_one_by_one() -> None:
    job = new_job(1, PROMPT, max_tokens=30, n=2)
    workers = running(job, 3, depth=2)
    workers.move(job, 1)
    workers.steps_of("s", 10)
    assert [workers.answers[job.request_id, index].worker for index in (0, 1)] == ["s", "t"]
    workers.move(job, 0)
    workers.steps_of("s", 10)
    assert [workers.answers[job.request_id, index].worker for index in (0, 1)] == ["t", "t"]
    assert workers.nodes["s"].core.idle
    finish(workers, job)


def test_the_second_continuation_finds_the_prompt_where_the_first_one_has_gone() -> None:
    job = new_job(1, list(range(32)), max_tokens=30, n=2)
    workers = running(job, 3)
    workers.move(job, 1)
    workers.steps_of("s", 10)
    key = workers.move(job, 0)
    workers.steps_of("s", 10)
    reused = [each.pages_reused for _, each in workers.reports if isinstance(each, Progress) and each.key == key]
    assert max(reused) == 8
    finish(workers, job)


@pytest.mark.parametrize("extra_tokens", range(4, 24))
@pytest.mark.parametrize("most_drafts", [0, MOST_DRAFTS])
def test_an_answer_is_cut_before_it_outgrows_what_is_granted(most_drafts: int, extra_tokens: int) -> None:
    job = new_job(1, PROMPT, max_tokens=60)
    workers = running(job, 5, depth=2, most_drafts=most_drafts)
    workers.move(job, extra_tokens=extra_tokens)
    for _ in range(4):
        for name in list(workers.streams):
            if name[0] != "copies":
                workers.deliver(*name)
    for _ in range(20 + extra_tokens):  # the copy takes long
        workers.plan("s")
        workers.plan("s")
        if workers.nodes["s"].steps:
            workers.commit("s")
    assert len(workers.output(job)) < 16 + extra_tokens
    workers.steps_of("s", 3)
    assert workers.answers[job.request_id, 0].worker == "t"
    finish(workers, job)


# ---- a move that fails before its commit


def goes_on(workers: Workers, job: Job) -> None:
    """The answer stays where it is, without a gap, and its client notices nothing."""
    workers.deliver_all()
    answer = workers.answers[job.request_id, 0]
    before = len(answer.tokens)
    workers.step("s")
    assert len(answer.tokens) == before + 1
    assert (answer.attempt, answer.worker, answer.is_lost, answer.shadow) == (0, "s", False, None)
    assert all(attempt != 0 for attempt, _ in failures(workers, "s"))
    finish(workers, job)


def test_a_target_without_room_changes_nothing() -> None:
    job = new_job(1, PROMPT, max_tokens=30)
    workers = running(job, t=9)
    workers.start(new_job(2, PROMPT, max_tokens=29), "t")
    workers.steps_of("t", 22)
    workers.move(job)
    workers.deliver_all()
    assert failures(workers, "t") == [(1, Failure.OVERLOADED)], "it does not wait for room"
    workers.steps_of("s", 30)
    assert workers.answers[job.request_id, 0].is_finished
    assert positions(workers, "s") == list(range(30))
    workers.run()
    workers.assert_nothing_held()


@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_copy_that_fails_leaves_it_where_it_is(in_doubt: bool) -> None:
    workers, job, key = moving()
    until(workers, lambda: bool(workers.streams.get(("copies", "s", "t"))))
    workers.streams["copies", "s", "t"].clear()
    peer = workers.nodes["t"].peer
    workers.handle("s", doors.ReceiverMessage(peer, key, doors.CopyStopped(None, "reset", in_doubt)))
    assert failures(workers, "s") == [(1, Failure.TRANSFER_FAILED)]
    workers.deliver_all()
    pool = workers.nodes["t"].scheduler.cache.pool
    assert bool(pool.num_quarantined) is in_doubt
    assert pool.num_granted == 0
    if in_doubt:
        workers.handle("t", doors.PeerGone(workers.nodes["s"].peer))
    goes_on(workers, job)


def test_a_stream_that_cannot_be_had_leaves_it_where_it_is_and_sets_nothing_aside_for_it() -> None:
    job = new_job(1, PROMPT, max_tokens=40)
    workers = running(job)
    workers.is_cut = True
    workers.move(job)
    workers.deliver_all()
    assert failures(workers, "s") == [(1, Failure.PEER_LOST)]
    assert workers.nodes["t"].core.idle
    goes_on(workers, job)


def test_a_last_page_that_fails_to_be_copied_is_written_beside() -> None:
    workers, job, key = moving(7)
    (sequence,) = workers.nodes["s"].scheduler.running
    until(workers, lambda: sequence.is_held and bool(workers.streams["copies", "s", "t"]))
    last = sequence.pages.held[-1]
    assert sequence.computed % PAGE_SIZE
    stuck = workers.streams["copies", "s", "t"].popleft()  # to be stopped later: it may read on
    workers.handle("s", doors.ReceiverMessage(stuck.peer, key, Withdrawn("out of time")))
    content = workers.nodes["s"].runner.read(last)
    for _ in range(3):
        workers.step("s")
    assert workers.nodes["s"].runner.read(last) == content
    assert sequence.pages.held[(sequence.computed - 1) // PAGE_SIZE] != last or sequence.computed % PAGE_SIZE == 0
    workers.handle("s", doors.ReceiverMessage(stuck.peer, key, doors.CopyStopped(None, "cancelled")))
    workers.answers[job.request_id, 0].shadow = None
    workers.queue("t", Cancelled(job.request_id, key.attempt, (0,)))
    goes_on(workers, job)


def test_a_page_whose_digest_differs_leaves_it_where_it_is() -> None:
    job = new_job(1, PROMPT, max_tokens=40)
    workers = running(job)
    workers.digest_of = lambda content: hash(content) + 1
    workers.move(job)
    workers.steps_of("s", 6)
    assert failures(workers, "t") == [(1, Failure.DIGEST_MISMATCH)]
    goes_on(workers, job)


@pytest.mark.parametrize("lost", [doors.ReceiverLost, doors.PeerGone])
def test_a_target_that_is_lost_before_the_commit_leaves_it_where_it_is(lost: type) -> None:
    workers, job, _ = moving()
    until(workers, lambda: bool(workers.streams.get(("copies", "s", "t"))))
    if lost is doors.ReceiverLost:
        workers.lose_stream("s", "t")
    else:
        workers.handle("s", doors.PeerGone(workers.nodes["t"].peer))
        workers.handle("t", doors.PeerGone(workers.nodes["s"].peer))
    workers.deliver_all()
    answer = workers.answers[job.request_id, 0]
    workers.step("s")
    assert failures(workers, "s") == [(1, Failure.PEER_LOST)]
    while not answer.is_finished:
        workers.steps_of("s", 1)
    assert answer.tokens == alone(job)[0]
    workers.handle("t", doors.PeerGone(workers.nodes["s"].peer))
    workers.assert_nothing_held()


@pytest.mark.parametrize("end", ["cancel", "router lost", "deadline"])
@pytest.mark.parametrize("moment", ["asked", "copying", "held", "committed"])
def test_a_request_that_ends_frees_everything_at_both_ends(end: str, moment: str) -> None:
    workers, job, _ = moving()
    if moment == "copying":
        until(workers, lambda: bool(workers.streams.get(("copies", "s", "t"))))
    elif moment == "held":
        until(workers, lambda: workers.nodes["s"].scheduler.running[0].is_held)
    elif moment == "committed":
        until_committed(workers)
    for name in ("s", "t"):
        if end == "cancel":
            workers.queue(name, Cancelled(job.request_id, Attempt(1)))
        elif end == "router lost":
            workers.queue(name, RouterLost(ROUTER))
    if end == "deadline":
        workers.now_s = 2e9
        for name in ("s", "t"):
            workers.queue(name, Ticked())
    workers.deliver_all()
    workers.run()
    assert not workers.nodes["s"].scheduler.running
    workers.assert_nothing_held()


def test_a_preempted_continuation_stays_and_its_move_ends() -> None:
    job, other = new_job(2, PROMPT, max_tokens=30), new_job(1, PROMPT[:5], max_tokens=30)
    workers = Workers(num_pages={"s": 13, "t": 64})
    workers.start(other)
    workers.start(job)
    while len(workers.output(job)) < 3:
        workers.steps_of("s", 1)
    workers.move(job)
    workers.deliver("router", "router", "s")  # and nothing more: no grant comes
    while not workers.nodes["s"].scheduler.num_preemptions:
        workers.step("s")
    workers.step("s")
    assert workers.nodes["s"].core.outgoing.num_open == 0
    assert failures(workers, "s") == [(1, Failure.SENDER_GAVE_UP)]
    workers.run()
    assert workers.output(job) == alone(job)[0]
    workers.assert_nothing_held()


def test_what_does_not_run_is_not_moved_and_its_router_learns_of_it() -> None:
    job = new_job(1, PROMPT, max_tokens=4)
    workers = running(job, 4)
    assert workers.answers[job.request_id, 0].is_finished
    workers.output(job).pop()  # a router that has its last token would not ask
    workers.move(job)
    workers.run()
    assert failures(workers, "s") == [(1, Failure.SENDER_GAVE_UP)]
    workers.assert_nothing_held()


def test_what_arrives_under_the_name_of_a_move_is_not_taken_for_it() -> None:
    job = new_job(1, PROMPT, max_tokens=30)
    workers = running(job)
    key = workers.move(job)
    workers.deliver("router", "router", "s")
    arriving = replace(job, attempt=key.attempt)
    workers.handle("s", Placed(ROUTER, arriving, FAR_S, source=workers.nodes["t"].peer))
    assert [each.stage for who, each in workers.reports if who == "s" and isinstance(each, Progress)][-1:] == [
        Stage.GRANTED
    ]
    assert workers.nodes["s"].core.outgoing.is_open(key), "the move goes on"
    workers.handle("s", Cancelled(job.request_id, key.attempt))


def test_a_move_asked_for_again_takes_the_place_of_the_one_before() -> None:
    job = new_job(1, PROMPT, max_tokens=40)
    workers = Workers(num_pages={"s": 64, "t": 64, "u": 64})
    workers.start(job)
    workers.steps_of("s", 6)
    workers.move(job, target="t")
    until(workers, lambda: bool(workers.streams.get(("copies", "s", "t"))))
    workers.queue("t", Cancelled(job.request_id, Attempt(1), (0,)))
    workers.move(job, target="u")
    workers.steps_of("s", 10)
    assert workers.answers[job.request_id, 0].worker == "u"
    finish(workers, job)


def ask_again(workers: Workers, job: Job) -> None:
    """Ask for one more move, to a worker that was not given the work."""
    asked = MoveAsked(ROUTER, AttemptKey(*job.key), 0, Attempt(9), workers.nodes["u"].peer, "address", 9)
    workers.handle("s", asked)


def test_a_continuation_that_was_held_for_a_move_goes_on_when_it_is_to_move_elsewhere() -> None:
    workers, job, _ = moving(u=64)
    until(workers, lambda: workers.nodes["s"].scheduler.running[0].is_held)
    assert not workers.committed
    ask_again(workers, job)
    finish(workers, job)


def test_a_continuation_whose_commit_has_left_moves_nowhere_else() -> None:
    workers, job, _ = moving(u=64)
    until_committed(workers)
    ask_again(workers, job)
    assert workers.nodes["s"].core.plan(0.0) is None, "it goes on where it has been committed to"
    finish(workers, job)
    assert workers.answers[job.request_id, 0].worker == "t"


def test_an_attempt_that_is_known_is_refused() -> None:
    workers, job, _ = moving()
    workers.deliver_all()
    peer = workers.nodes["t"].peer
    again = MoveAsked(ROUTER, AttemptKey(job.request_id, job.attempt), 0, Attempt(1), peer, "address", 9)
    with pytest.raises(ProtocolError):
        workers.nodes["s"].core.handle(again, 0.0)


# ---- a move that fails after its commit


def test_a_target_that_ends_after_the_commit_ends_the_attempt_here() -> None:
    job = new_job(1, PROMPT, max_tokens=40, n=2)
    workers = running(job, 4)
    workers.move(job, 1)
    until_committed(workers)
    workers.handle("s", doors.PeerGone(workers.nodes["t"].peer))
    assert failures(workers, "s") == [(0, Failure.PEER_LOST)]
    assert workers.nodes["s"].core.idle
    assert workers.nodes["s"].scheduler.cache.pool.num_free == 64


# ---- all orders


@settings(deadline=None, max_examples=150)
@given(data=st.data(), seed=st.integers(0, 10**9), depth=st.integers(1, 2))
def test_whatever_happens_when_every_token_comes_once_and_every_page_comes_back(
    data: st.DataObject, seed: int, depth: int
) -> None:
    rng = random.Random(seed)
    workers = Workers(rng, {"s": 24, "t": 24}, depth)
    prompts = [[rng.randrange(900) for _ in range(rng.randrange(1, 14))] for _ in range(3)]
    jobs = [new_job(number, prompt, max_tokens=24, n=rng.choice([1, 1, 2])) for number, prompt in enumerate(prompts)]
    for job in jobs:
        workers.start(job, rng.choice("st"))
    for choice in data.draw(st.lists(st.integers(0, 40), max_size=80)):
        disturb(workers, choice)
        for _ in range(choice % 7):
            workers.anything()
    workers.run()
    workers.attach_again()
    workers.run()
    for (request_id, index), answer in workers.answers.items():
        assert answer.tokens == alone(answer.job)[index], (request_id, index)
    workers.assert_nothing_held()


def disturb(workers: Workers, choice: int) -> None:
    """Move a continuation, cancel one that moves, break a copy, or lose the stream that one moves on; or nothing."""
    present = [(name, a) for name, a in workers.answers.items() if not a.is_finished and not a.is_lost and a.tokens]
    movable = [(name, answer) for name, answer in present if answer.shadow is None]
    moving = [(name, answer.worker, answer.shadow) for name, answer in present if answer.shadow is not None]
    if choice < 8 and movable:
        (_, index), answer = movable[choice % len(movable)]
        workers.move(answer.job, index, "t" if answer.worker == "s" else "s", (0, 2, 9, 20)[choice % 4])
    elif choice == 8 and moving:
        (request_id, index), source, (attempt, target) = moving[0]
        for worker in (source, target):
            workers.queue(worker, Cancelled(request_id, attempt, (index,)))
        del workers.answers[request_id, index]
    elif choice == 9 and moving:
        _, source, (_, target) = moving[0]
        workers.lose_stream(source, target)
    elif choice == 10:
        workers.breaks_next_copy = True
