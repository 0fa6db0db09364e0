"""A hand-off that fails leaves what has landed whole in the prefix cache, and nothing else."""

from collections.abc import Callable

import pytest
from capsules import capsule
from lone_core import PAGE_SIZE, LoneCore

from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.decode_worker import receiver
from pdserve.engine.sequence import Job
from pdserve.kvtransfer import doors
from pdserve.kvtransfer.session import Commit, Grant, PagesLanded, Quiesced
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.reports import Failure
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.messages import Cancelled, Command, Failed

NUM_PAGES = 16
P = Peer(WorkerId("p"), Incarnation(3))
PROMPT = tuple(range(18))  # four full pages, and one that is not
REQUEST = RequestId(b"r" * 16)


class Worker(LoneCore):
    """A decode worker's core, attached to a sender."""

    def __init__(self, max_num_seqs: int = 8, *, checks_digests: bool = True) -> None:
        hasher = PrefixHasher(b"secret", "model", PAGE_SIZE)
        super().__init__(NUM_PAGES, hasher=hasher, max_num_seqs=max_num_seqs, checks_digests=checks_digests)
        self.handle(doors.SenderAttached(P))
        self.attempt = -1

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(REQUEST, Attempt(self.attempt))

    def place_next(self) -> Grant:
        """Place the next attempt; return its grant."""
        commands = self.place(self.next_job(len(PROMPT)), source=P)
        (grant,) = [command.message for command in commands if isinstance(command, doors.ToSender)]
        return grant

    def next_job(self, num_prompt_tokens: int) -> Job:
        self.attempt += 1
        return Job(REQUEST, self.key.attempt, PROMPT, num_prompt_tokens, SamplingParams(max_tokens=3), (0,))

    def say(self, event: receiver.Event) -> list[Command]:
        return self.handle(doors.SenderMessage(P, self.key, event))

    def land(self, num_pages: int) -> None:
        self.say(PagesLanded((7,) * num_pages))

    def checked(self, mismatch: int | None = None) -> None:
        self.handle(doors.DigestsChecked(self.key, mismatch))

    def quiesce(self) -> None:
        self.say(Quiesced("failed"))

    def place_failing(self, num_landed: int) -> None:
        """Place the next attempt, whose hand-off fails when so many more pages have landed whole."""
        self.place_next()
        self.land(num_landed)
        self.checked()
        self.quiesce()

    def lose(self) -> None:
        self.handle(doors.SenderLost(P, "cut"))

    def gone(self) -> None:
        self.handle(doors.PeerGone(P))
        self.handle(doors.SenderAttached(P))

    def cancel(self) -> None:
        self.handle(Cancelled(REQUEST, self.key.attempt))

    def commit(self, grant: Grant) -> None:
        self.say(Commit(grant.capability, capsule(len(PROMPT), (0, 7))))


def num_kept(worker: Worker) -> int:
    """Return how many leading pages the next attempt need not send, after all pages came back."""
    assert worker.cache.pool.num_free == NUM_PAGES
    worker.cache.check()
    return worker.place_next().first_page


Story = Callable[[Worker, Grant], object]


@pytest.mark.parametrize(
    ("story", "kept"),
    [
        (lambda w, _: (w.land(2), w.checked(), w.quiesce()), 2),
        (lambda w, _: (w.land(2), w.checked(), w.land(2), w.quiesce()), 2),
        (lambda w, _: (w.land(2), w.checked(), w.land(2), w.checked(), w.quiesce()), 4),
        (lambda w, _: (w.land(5), w.checked(), w.quiesce()), 4),  # the last one is not full
        (lambda w, _: (w.land(4), w.checked(2), w.quiesce()), 2),
        (lambda w, _: (w.land(2), w.checked(), w.land(2), w.checked(0), w.quiesce()), 2),
        (lambda w, _: (w.land(3), w.checked(), w.lose(), w.gone()), 3),
        (lambda w, _: (w.land(3), w.lose(), w.checked(), w.gone()), 3),
        (lambda w, _: (w.land(3), w.lose(), w.checked(1), w.gone()), 1),
        (lambda w, _: (w.land(3), w.lose(), w.gone(), w.checked()), 0),  # too late: nobody holds them
        (lambda w, _: (w.land(3), w.checked(), w.cancel(), w.land(1), w.quiesce()), 3),
        (lambda w, g: (w.land(5), w.checked(), w.commit(g), w.cancel()), 4),
        (lambda w, g: (w.land(4), w.checked(), w.land(1), w.commit(g), w.cancel()), 4),
        (lambda w, g: (w.land(5), w.commit(g), w.cancel()), 0),
    ],
)
def test_the_leading_full_pages_whose_digests_agreed_are_found_by_the_next_attempt(story: Story, kept: int) -> None:
    worker = Worker()
    story(worker, worker.place_next())
    assert num_kept(worker) == kept


def test_pages_under_check_when_a_hand_off_ends_are_not_kept() -> None:
    worker = Worker()
    worker.place_next()
    worker.land(2)
    worker.quiesce()
    assert num_kept(worker) == 0


def test_nothing_is_found_of_pages_that_a_sender_may_still_write() -> None:
    worker = Worker()
    worker.place_next()
    worker.land(3)
    worker.checked()
    worker.lose()
    assert worker.cache.pool.num_quarantined == 5
    assert worker.cache.num_cached == 0
    worker.cache.check()


def test_without_checks_nothing_is_kept_of_a_hand_off_that_fails() -> None:
    worker = Worker(checks_digests=False)
    worker.place_next()
    worker.land(5)
    worker.quiesce()
    assert num_kept(worker) == 0


def test_each_attempt_adds_to_what_those_before_it_have_left() -> None:
    worker = Worker()
    for first_page in range(4):
        assert worker.place_next().first_page == first_page
        worker.land(1)
        worker.checked()
        worker.quiesce()
        assert worker.cache.pool.num_free == NUM_PAGES
    grant = worker.place_next()
    assert (grant.first_page, len(grant.pages)) == (4, 1)


def test_a_page_that_was_kept_is_given_out_last() -> None:
    worker = Worker()
    worker.place_failing(4)
    taken = worker.cache.take(NUM_PAGES - 1)
    assert taken is not None
    assert worker.cache.num_cached == 1, "of the pages that were kept, the first is the last to be overwritten"


def test_a_job_with_more_tokens_than_its_answer_may_have_is_refused() -> None:
    worker = Worker()
    worker.place_failing(4)
    free = worker.cache.pool.num_free
    (failed,) = worker.place(worker.next_job(2), source=P)
    assert isinstance(failed, Failed)
    assert failed.code is Failure.INVALID
    assert worker.cache.pool.num_free == free


def test_a_sender_whose_stream_is_lost_is_sent_its_grant_when_it_attaches_again() -> None:
    worker = Worker()
    worker.lose()
    commands = worker.place(worker.next_job(len(PROMPT)), source=P)
    assert not any(isinstance(command, doors.ToSender) for command in commands)
    (offered,) = worker.handle(doors.SenderAttached(P))
    assert isinstance(offered, doors.ToSender)
    assert isinstance(offered.message, Grant)


def reusing(num_landed: int) -> Worker:
    """Return a worker that has given up a hand-off after two pages of an earlier one, when more of its own landed."""
    worker = Worker()
    worker.place_failing(2)
    assert worker.place_next().first_page == 2
    worker.land(num_landed)
    worker.checked()
    worker.cancel()
    return worker


def test_a_hand_off_in_quarantine_holds_no_page_that_it_reused() -> None:
    worker = reusing(num_landed=2)
    assert worker.cache.pool.num_quarantined == 3
    assert worker.cache.pool.num_free == NUM_PAGES - 3
    worker.quiesce()
    assert num_kept(worker) == 4


def test_what_landed_after_reused_pages_that_were_overwritten_is_not_kept() -> None:
    worker = reusing(num_landed=2)
    others = worker.cache.take(NUM_PAGES - 3)
    assert others is not None
    worker.quiesce()
    assert worker.cache.num_cached == 0
    worker.cache.pool.release(others)
    assert num_kept(worker) == 0


def test_a_hand_off_in_quarantine_keeps_no_place_in_the_batch() -> None:
    worker = Worker(max_num_seqs=1)
    worker.place_next()
    worker.cancel()
    assert worker.cache.pool.num_quarantined
    assert worker.place_next().pages
