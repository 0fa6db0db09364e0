"""A hand-off of two ranks' parts has landed when both have, whichever is first, and fails as a whole."""

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from joined_cores import PAGE_SIZE
from ranked_workers import RankedWorkers
from small_models import small_model
from two_workers import alone, new_job

from pdserve.engine.runner import Runner
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import PagesLanded
from pdserve.model.family import Model
from pdserve.prefill_worker.sender import State
from pdserve.protocol.reports import Failure
from pdserve.worker.messages import Failed

PROMPT = [17, 200, 3, 511, 42, 8, 77]


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ranked(model: Model, closing: ExitStack, seed: int = 0) -> RankedWorkers:
    workers = RankedWorkers(lambda size: new_runner(model, size), random.Random(seed))
    closing.callback(workers.close)
    return workers


def new_runner(model: Model, num_pages: int) -> Runner:
    return Runner(model, num_pages, PAGE_SIZE, ())


def finish(workers: RankedWorkers, model: Model, job: Job) -> None:
    """Let all that is left happen: the answer is that of one engine of one rank, and nothing is held."""
    workers.run()
    wanted = alone(job, lambda size: new_runner(model, size))  # type: ignore[arg-type, return-value]
    for index in job.indices:
        tokens = [token.token_id for token in workers.output(job, index)]
        assert tokens == [token.token_id for token in wanted[index]]
    workers.assert_nothing_held()


def copying(workers: RankedWorkers, job: Job) -> None:
    """Move an answer until copies of both parts are under way."""
    workers.start(job)
    workers.steps_of("s", 7)
    workers.move(job)
    for name in ("router", "hand-offs", "answers", "router"):
        for source, target in (("router", "s"), ("router", "t"), ("s", "t"), ("t", "s")):
            workers.deliver(name, source, target)
    assert workers.streams["part 0", "s", "t"]
    assert len(workers.streams["part 0", "s", "t"]) == len(workers.streams["part 1", "s", "t"])


def landed(workers: RankedWorkers) -> int:
    """Return how many pages the receiver has been told of, and has yet to read of."""
    said = [each.event for each in workers.stream("hand-offs", "s", "t") if isinstance(each, doors.SenderMessage)]
    return sum(len(each.digests) for each in said if isinstance(each, PagesLanded))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "n": 2}])
def test_a_moved_answer_is_that_of_one_rank_whichever_part_lands_first(
    model: Model, closing: ExitStack, seed: int, params: dict[str, float]
) -> None:
    workers, job = ranked(model, closing, seed), new_job(3, PROMPT, max_tokens=32, **params)
    workers.start(job)
    workers.steps_of("s", 7)
    for index in job.indices:
        workers.move(job, index)
    for _ in range(workers.rng.randrange(60)):
        workers.anything()
    finish(workers, model, job)
    assert {workers.answers[job.request_id, index].worker for index in job.indices} == {"t"}


@pytest.mark.parametrize("first", [0, 1])
def test_pages_have_landed_when_both_parts_have(model: Model, closing: ExitStack, first: int) -> None:
    workers, job = ranked(model, closing), new_job(3, PROMPT, max_tokens=40)
    copying(workers, job)
    num_copies = len(workers.streams["part 0", "s", "t"])
    for _ in range(num_copies):
        workers.deliver(f"part {first}", "s", "t")
        assert landed(workers) == 0
    workers.deliver(f"part {1 - first}", "s", "t")
    assert landed(workers) > 0
    finish(workers, model, job)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_part_that_fails_leaves_the_answer_where_it_is(
    model: Model, closing: ExitStack, part: int, in_doubt: bool
) -> None:
    workers, job = ranked(model, closing), new_job(3, PROMPT, max_tokens=40)
    copying(workers, job)
    workers.broken.append((part, in_doubt))
    (half,) = workers.nodes["s"].core.outgoing._handoffs.values()
    workers.deliver(f"part {part}", "s", "t")
    assert [each.code for _, each in workers.reports if isinstance(each, Failed)] == [Failure.TRANSFER_FAILED]
    assert half.sender.state is State.DRAINING, "the other part reads on"
    workers.deliver_all()
    assert half.sender.state is (State.IN_DOUBT if in_doubt else State.CLOSED)
    assert bool(workers.nodes["t"].scheduler.cache.pool.num_quarantined) is in_doubt
    if in_doubt:
        workers.handle("t", doors.PeerGone(workers.nodes["s"].peer))
    workers.steps_of("s", 40)
    assert workers.answers[job.request_id, 0].worker == "s"
    finish(workers, model, job)


def test_parts_that_were_written_into_each_others_place_are_found(model: Model, closing: ExitStack) -> None:
    workers, job = ranked(model, closing), new_job(3, PROMPT, max_tokens=40)
    copying(workers, job)
    engine = workers.engine("t")
    (copy,) = {command.dst for _, command in workers.streams["part 0", "s", "t"]}
    for part in (0, 1):
        while workers.deliver(f"part {part}", "s", "t"):
            pass
    halves = [engine.read(copy[0], part) for part in (0, 1)]
    assert halves[0] != halves[1]
    for part in (0, 1):
        engine.write(copy[0], halves[1 - part], part)
    workers.steps_of("s", 40)
    failed = [each.reason for who, each in workers.reports if isinstance(each, Failed) and who == "t"]
    assert failed == ["digest of page 0 differs from the sender's"]
    finish(workers, model, job)
