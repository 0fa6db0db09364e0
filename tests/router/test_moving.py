"""Running continuations that move from one worker to another, as the router sees it: each token is taken once."""

import pytest
from router_driver import LAYOUT, LENGTH, PROMPT, STOP, Driver

from pdserve.base.ids import RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.protocol.prefix_hash import EVERYONE
from pdserve.protocol.refusal import Cause, Refused
from pdserve.protocol.reports import Failure, LoadPart, ReportedLoad, Stage
from pdserve.router.config import Limits
from pdserve.router.placement.moving import MAX_MOVES
from pdserve.router.placement.predict import Predictor, Prompt
from pdserve.router.placement.sessions import Home, session_key
from pdserve.router.placement.view import WorkerView
from pdserve.router.requests.commands import CancelAttempt, Move, Warn
from pdserve.router.requests.events import (
    ClientGone,
    DrainAsked,
    LinkId,
    LinkLost,
    LoadReported,
    MovesAsked,
    PairMeasured,
    RoleAsked,
    StopStringFound,
)

LONG = 400  # tokens of answers that are worth a move


class Moves(Driver):
    """A prefill worker, a decode worker on which answers run, and another one with room."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.p, self.s = self.pair()
        self.t = LinkId(0)

    def run_on_s(self, *, n: int = 1, max_tokens: int = LONG) -> RequestId:
        """Return a request that decodes on S: it has its first two tokens of each continuation."""
        request = self.arrive(n=n, max_tokens=max_tokens)
        attempt = self.placed().spec.attempt
        for index in range(n):
            self.tokens(self.p, request, 0, 10 * index, index=index, attempt=attempt)
        self.stage(self.s, request, Stage.COMMITTED, attempt=attempt)
        for index in range(n):
            self.tokens(self.s, request, 1, 10 * index + 1, index=index, attempt=attempt)
        return request

    def attach_t(self, **changes: object) -> LinkId:
        self.t = self.attach("d1", **changes)
        return self.t

    def moves(self) -> list[Move]:
        return [command for command in self.last if isinstance(command, Move)]

    def ask(self, max_sequences: int = 0) -> list[Move]:
        self.post(MovesAsked(self.s, self.t, max_sequences))
        return self.moves()

    def moving(self, **params: int) -> RequestId:
        """Return a request whose only continuation is on its way from S to T, as attempt 1."""
        request = self.run_on_s(**params)
        self.attach_t()
        (move,) = self.ask()
        assert (move.spec.attempt, move.attempt) == (1, 0)
        return request

    def moved(self) -> RequestId:
        """Return a request whose only continuation has moved to T."""
        request = self.moving()
        self.stage(self.t, request, Stage.COMMITTED, attempt=1)
        return request

    def assert_idle(self, request: RequestId) -> None:
        assert request in self.ends
        self.core.check_idle()


def test_a_move_names_what_the_target_is_given_and_asks_the_source() -> None:
    d = Moves()
    request = d.run_on_s(max_tokens=100)
    d.attach_t()
    (move,) = d.ask()
    assert (move.source.link, move.target.link) == (d.s, d.t)
    assert (tuple(move.spec.token_ids), move.spec.num_prompt_tokens) == ((*PROMPT, 0, 1), len(PROMPT))
    assert (move.spec.request_id, move.spec.indices) == (request, (0,))
    assert move.extra_tokens > LAYOUT.page_size
    assert len(d.core.workers.known(d.t).shares) == 1


def test_no_room_is_asked_for_more_tokens_than_an_answer_may_have() -> None:
    d = Moves()
    d.run_on_s(max_tokens=22)
    d.attach_t()
    (move,) = d.ask()
    assert move.extra_tokens == 20


def test_room_is_asked_for_what_comes_while_moves_take_as_long_as_they_did_lately() -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    d.attach_t()
    extra_tokens = []
    for _ in range(3):
        request = d.run_on_s()
        (move,) = d.ask()
        extra_tokens.append(move.extra_tokens)
        d.wait(2.0)
        d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    assert extra_tokens == sorted(set(extra_tokens))
    assert extra_tokens[-1] > 2 * LAYOUT.page_size


def test_a_move_is_in_the_ledger_and_is_counted() -> None:
    d = Moves()
    request = d.moving()
    d.stage(d.t, request, Stage.LANDED, attempt=1, handoff_bytes=4096, handoff_s=0.002)
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    d.tokens(d.t, request, 2, 2, attempt=1, end=STOP)
    (moved,) = d.answer(request).ledger.moves
    assert (moved.index, moved.num_tokens, moved.source, moved.target) == (0, 2, "d0", "d1")
    assert (moved.handoff_bytes, moved.handoff_ms) == (4096, 2.0)
    assert d.core.placements.shadows.ended == {"done": 1}


def test_the_timeline_keeps_the_hand_off_of_the_prompt() -> None:
    d = Moves()
    request = d.run_on_s()
    d.wait(3.0)
    d.post(LoadReported(d.s, ReportedLoad(100)))
    d.attach_t()
    d.ask()
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    d.tokens(d.t, request, 2, 2, attempt=1, end=STOP)
    assert dict(d.answer(request).ledger.steps)[Stage.COMMITTED] == 0.0


def test_shares_are_moved_once() -> None:
    d = Moves()
    d.moved()
    source, target = d.core.workers.known(d.s), d.core.workers.known(d.t)
    assert (source.num_sequences, target.num_sequences) == (0, 1)
    assert target.num_arriving == 0
    source.check_idle()


@pytest.mark.parametrize("failure", list(Failure))
def test_a_move_that_fails_costs_nothing(failure: Failure) -> None:
    d = Moves()
    request = d.moving()
    d.fail(d.t, request, failure, attempt=1)
    assert (d.cancels(), d.placements()) == ([], [])
    d.core.workers.known(d.t).check_idle()
    d.tokens(d.s, request, 2, 2, end=STOP)
    assert d.delivered[request, 0] == [0, 1, 2]
    ledger = d.answer(request).ledger
    assert (ledger.attempts, ledger.moves) == (1, ())
    assert d.core.placements.shadows.ended == {failure.name.lower(): 1}


@pytest.mark.parametrize("failure", [Failure.TRANSFER_FAILED, Failure.PEER_LOST, Failure.SENDER_GAVE_UP])
def test_a_move_that_its_source_reports_failed_is_cancelled_at_its_target(failure: Failure) -> None:
    d = Moves()
    request = d.moving()
    d.fail(d.s, request, failure, attempt=1)
    assert (d.cancels(), d.placements()) == ([CancelAttempt(d.t, request, 1, (0,))], [])
    assert d.core.placements.shadows.num_leaving(d.core.workers.known(d.s)) == 0
    d.core.workers.known(d.t).check_idle()
    d.fail(d.t, request, Failure.SENDER_GAVE_UP, attempt=1)
    assert (d.cancels(), d.placements()) == ([], []), "late news"
    d.tokens(d.s, request, 2, 2, end=STOP)
    assert d.delivered[request, 0] == [0, 1, 2]
    d.answer(request)


def test_a_conversation_lives_where_its_answer_has_moved_to() -> None:
    d = Moves()
    request = d.run_on_s()
    key, sessions = session_key(EVERYONE, "talk"), d.core.placements.sessions
    d.core.placements.requests[request].session = key
    sessions.bind(key, Home(d.p, d.s), d.now_s)
    d.attach_t()
    d.ask()
    assert sessions.home(key, d.now_s) == Home(d.p, d.s)
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    assert sessions.home(key, d.now_s) == Home(d.p, d.t)


def test_where_it_has_moved_to_decides_what_becomes_of_it_and_no_longer_its_source() -> None:
    d = Moves()
    request = d.moved()
    d.stage(d.s, request, Stage.FINISHED, attempt=1)
    d.fail(d.s, request, Failure.PEER_LOST, attempt=1)
    assert (d.cancels(), d.placements()) == ([], [])
    d.tokens(d.t, request, 2, 2, attempt=1, end=STOP)
    assert d.delivered[request, 0] == [0, 1, 2]


def test_no_commit_is_taken_from_the_source_of_a_move() -> None:
    d = Moves()
    request = d.moving()
    d.stage(d.s, request, Stage.COMMITTED, attempt=1)
    d.tokens(d.s, request, 2, 2, end=STOP)
    assert d.delivered[request, 0] == [0, 1, 2]
    assert d.core.placements.shadows.ended == {}


@pytest.mark.parametrize("failure", [Failure.OVERLOADED, Failure.PEER_LOST])
def test_a_target_that_could_not_take_it_is_not_asked_again_at_once_and_others_are(failure: Failure) -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    request = d.run_on_s()
    d.attach_t()
    d.post(DrainAsked(d.s))
    d.wait(0.9)
    d.fail(d.t, request, failure, attempt=1)
    d.wait(0.15)
    d.post(LoadReported(d.s, ReportedLoad(100, draining=True)))
    assert d.moves() == []
    other = d.attach("d2")
    d.post(LoadReported(d.s, ReportedLoad(100, draining=True)))
    (move,) = d.moves()
    assert move.target.link == other
    d.fail(other, request, failure, attempt=2)
    d.wait(1.1)
    d.post(LoadReported(d.s, ReportedLoad(100, draining=True)))
    (move,) = d.moves()
    assert move.target.link == d.t


@pytest.mark.parametrize("loss", ["lost", "failed"])
def test_where_the_source_fails_the_target_is_waited_for(loss: str) -> None:
    d = Moves()
    request = d.moving()
    if loss == "lost":
        d.post(LinkLost(d.s, "its stream ended"))
    else:
        d.fail(d.s, request, Failure.PEER_LOST)
    assert d.placements() == []
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    d.tokens(d.t, request, 2, 2, 3, attempt=1, end=STOP)
    assert d.delivered[request, 0] == [0, 1, 2, 3]
    assert d.answer(request).ledger.attempts == 1


def test_after_it_has_moved_nothing_is_lost_with_the_source() -> None:
    d = Moves()
    request = d.moved()
    d.post(LinkLost(d.s, "its stream ended"))
    assert d.placements() == []
    d.tokens(d.t, request, 2, 2, attempt=1, end=STOP)
    d.answer(request)


@pytest.mark.parametrize("end", ["stop", "client", "deadline", "source"])
def test_what_ends_while_it_moves_ends_at_both(end: str) -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    request = d.moving()
    match end:
        case "stop":
            d.post(StopStringFound(request, 0))
        case "client":
            d.post(ClientGone(request))
        case "deadline":
            d.wait(60.0)
        case "source":
            d.tokens(d.s, request, 2, 2, end=STOP)
    stopped = {(cancel.link, cancel.attempt, cancel.indices) for cancel in d.cancels()}
    assert stopped == {(d.t, 1, (0,))} | ({(d.s, 0, ())} if end != "source" else set())
    d.assert_idle(request)
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    d.tokens(d.t, request, 2, 2, attempt=1)
    d.core.check_idle()


def test_continuations_of_one_request_move_one_by_one() -> None:
    d = Moves()
    request = d.run_on_s(n=3)
    d.attach_t()
    moves = d.ask(max_sequences=2)
    assert [(move.spec.indices, move.spec.attempt) for move in moves] == [((0,), 1), ((1,), 2)]
    d.stage(d.t, request, Stage.COMMITTED, attempt=2)
    assert d.cancels() == [CancelAttempt(d.s, request, 0, (1,))]
    d.tokens(d.t, request, 2, 12, attempt=2, index=1, end=STOP)
    d.fail(d.t, request, Failure.OVERLOADED, attempt=1)
    d.tokens(d.s, request, 2, 2, index=0, end=STOP)
    d.tokens(d.s, request, 2, 22, index=2, end=STOP)
    assert d.delivered == {(request, 0): [0, 1, 2], (request, 1): [10, 11, 12], (request, 2): [20, 21, 22]}
    d.answer(request)


def test_where_the_source_fails_only_what_does_not_move_is_placed_again() -> None:
    d = Moves()
    request = d.run_on_s(n=2)
    d.attach_t()
    d.ask(max_sequences=1)
    d.post(LinkLost(d.s, "its stream ended"))
    assert [place.spec.indices for place in d.placements()] == [(1,)]
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    d.tokens(d.t, request, 2, 2, attempt=1, end=STOP)
    d.post(ClientGone(request))
    d.assert_idle(request)


def test_prompts_that_are_not_handed_off_yet_do_not_move() -> None:
    d = Moves()
    request = d.arrive(max_tokens=LONG)
    d.attach_t()
    assert d.ask() == []
    d.tokens(d.p, request, 0, 0)
    assert d.ask() == []
    d.stage(d.s, request, Stage.COMMITTED)
    assert len(d.ask()) == 1


def test_what_is_about_to_end_stays() -> None:
    d = Moves()
    d.run_on_s(max_tokens=4)
    d.attach_t()
    assert d.ask() == []


# ---- draining


def test_all_that_decodes_on_a_draining_worker_moves_a_few_at_a_time_longest_first() -> None:
    d = Moves()
    requests = [d.run_on_s(max_tokens=20 + 8 * number) for number in range(MAX_MOVES + 2)]
    d.attach_t(max_num_seqs=16)
    d.post(DrainAsked(d.s))
    first = d.moves()
    assert [move.spec.request_id for move in first] == requests[:1:-1]
    assert len(first) == MAX_MOVES
    for request, follower in zip(requests[:-3:-1], requests[1::-1], strict=True):
        d.stage(d.t, request, Stage.COMMITTED, attempt=1)
        assert [move.spec.request_id for move in d.moves()] == [follower]
    for request in requests:
        d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    assert not d.core.workers.known(d.s).shares
    for request in requests:
        d.tokens(d.t, request, 2, 2, attempt=1, end=LENGTH)
    d.core.check_idle()


def test_a_worker_that_reports_that_it_drains_is_emptied() -> None:
    d = Moves()
    d.run_on_s()
    d.attach_t()
    d.post(LoadReported(d.s, ReportedLoad(100, draining=True)))
    assert len(d.moves()) == 1


def test_what_finds_no_room_waits_for_loads_to_be_reported() -> None:
    d = Moves()
    d.run_on_s()
    d.attach_t()
    d.post(LoadReported(d.t, ReportedLoad(0, others=LoadPart(num_running=1))))
    d.post(DrainAsked(d.s))
    assert d.moves() == []
    d.post(LoadReported(d.t, ReportedLoad(90, others=LoadPart(num_running=1))))
    d.post(LoadReported(d.s, ReportedLoad(100, draining=True)))
    assert len(d.moves()) == 1


def test_nothing_moves_to_a_worker_that_drains() -> None:
    d = Moves()
    d.run_on_s()
    d.attach_t()
    d.post(DrainAsked(d.t))
    d.post(DrainAsked(d.s))
    assert d.moves() == []


def test_what_a_drained_worker_leaves_behind_is_placed_again_and_is_not_suspected_of_its_end() -> None:
    d = Moves()
    request = d.run_on_s()
    for name in ("d1", "d2", "d3"):
        attempt, decode = d.core.placements.requests[request].sequences[0].placement.attempt, d.s
        d.post(DrainAsked(decode))
        d.s = d.attach(name)
        d.post(LinkLost(decode, "its stream ended"))
        place = d.placed()
        assert (place.decode.link, place.spec.attempt) == (d.s, attempt + 1)
    d.stage(d.s, request, Stage.COMMITTED, attempt=3)
    d.tokens(d.s, request, 2, 2, attempt=3, end=STOP)
    d.answer(request)


# ---- for want of pages


def short_of_pages(d: Moves, *, target_pages: int, source_pages: int = 5) -> list[Move]:
    for _ in range(4):
        d.run_on_s()
    d.attach_t()
    d.post(LoadReported(d.t, ReportedLoad(target_pages)))
    d.post(LoadReported(d.s, ReportedLoad(source_pages)))
    return d.moves()


@pytest.mark.parametrize(("num_free", "num_moved"), [(5, 1), (3, 2), (0, 3)])
def test_a_worker_that_is_about_to_preempt_hands_over_as_few_as_are_enough(num_free: int, num_moved: int) -> None:
    d = Moves()
    assert len(short_of_pages(d, target_pages=90, source_pages=num_free)) == num_moved
    d.post(LoadReported(d.s, ReportedLoad(0)))
    assert d.moves() == []  # while these are on their way


def test_a_worker_with_pages_keeps_what_it_has() -> None:
    d = Moves()
    for _ in range(4):
        d.run_on_s()
    d.attach_t()
    d.post(LoadReported(d.s, ReportedLoad(6)))
    assert d.moves() == []


def test_what_moved_for_want_of_pages_does_not_move_back_at_once() -> None:
    d = Moves()
    moves = short_of_pages(d, target_pages=90)
    for move in moves:
        d.stage(d.t, move.spec.request_id, Stage.COMMITTED, attempt=1)
    d.post(LoadReported(d.s, ReportedLoad(90)))
    d.post(LoadReported(d.t, ReportedLoad(1)))
    assert d.moves() == []
    d.wait(0.9)
    d.post(LoadReported(d.t, ReportedLoad(1)))
    assert d.moves() == []


def test_nothing_moves_for_want_of_pages_to_a_worker_that_has_few_itself() -> None:
    assert short_of_pages(Moves(), target_pages=0) == []


def test_requests_are_not_refused_for_their_moves() -> None:
    d = Moves(Limits(max_attempts=1, max_interruptions=1, worker_silence_s=1e6))
    request = d.moving()
    for attempt in range(1, 6):
        d.fail(d.t, request, Failure.OVERLOADED, attempt=attempt)
        d.wait(1.0)
        assert not isinstance(d.ends.get(request), Refused)
        d.ask()
    d.tokens(d.s, request, 2, 2, end=STOP)
    d.answer(request)


# ---- what an operator asked for and cannot be done


def is_short_of_pages(d: Moves) -> list[Move]:
    d.post(LoadReported(d.s, ReportedLoad(0)))
    return d.moves()


def test_an_order_whose_target_has_left_is_dropped() -> None:
    d = Moves()
    d.run_on_s()
    d.attach_t()
    d.post(LoadReported(d.t, ReportedLoad(0, others=LoadPart(num_running=1))))
    assert d.ask() == []
    d.post(LinkLost(d.t, "its stream ended"))
    d.attach_t()
    d.post(LoadReported(d.t, ReportedLoad(90)))
    assert len(is_short_of_pages(d)) == 1


def test_an_order_whose_target_has_no_room_keeps_nothing_from_moving_elsewhere_for_want_of_pages() -> None:
    d = Moves()
    d.run_on_s()
    d.attach_t()
    d.post(LoadReported(d.t, ReportedLoad(0, others=LoadPart(num_running=1))))
    assert d.ask() == []
    other = d.attach("d2")
    d.post(LoadReported(other, ReportedLoad(90)))
    (move,) = is_short_of_pages(d)
    assert move.target.link == other


# ---- how long moves take


def test_moves_that_failed_slowly_are_forgotten_after_a_while() -> None:
    d = Moves(Limits(worker_silence_s=1e6))

    def num_moves() -> int:
        request = d.run_on_s(max_tokens=100)
        d.attach_t()
        moves = d.ask()
        if moves:
            d.wait(59.0)
            d.fail(d.t, request, Failure.PEER_LOST, attempt=1)
        d.post(LinkLost(d.t, "its stream ended"))
        d.post(ClientGone(request))
        return len(moves)

    assert num_moves() == 1
    assert num_moves() == 0, "it would have ended before"
    d.wait(600.0)
    assert num_moves() == 1


# ---- nobody knows what has become of it


def test_a_target_that_never_reports_after_the_source_was_lost_is_given_up() -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    request = d.moving()
    d.attach("d2")
    d.post(LinkLost(d.s, "its stream ended"))
    d.run(1.5)
    assert len(d.core.workers.known(d.t).shares) == 1, "it may still come"
    d.run(1.0)
    d.core.workers.known(d.t).check_idle()
    d.tokens(d.p, request, 2, 2, attempt=2)
    assert d.delivered[request, 0] == [0, 1, 2]


def test_a_target_that_has_reported_is_not_given_up() -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    request = d.moving()
    d.post(LinkLost(d.s, "its stream ended"))
    d.stage(d.t, request, Stage.COMMITTED, attempt=1)
    d.run(30.0)
    d.tokens(d.t, request, 2, 2, attempt=1, end=STOP)
    assert d.answer(request).ledger.attempts == 1


def test_it_moves_to_a_worker_that_computes_no_prompt_although_more_decodes_there() -> None:
    d = Moves()
    d.run_on_s()
    d.attach_t()
    idle = d.attach("d2")
    d.post(LoadReported(d.t, ReportedLoad(pages_free=1000, others=LoadPart(waiting_tokens=400))))
    d.post(LoadReported(idle, ReportedLoad(pages_free=1000, others=LoadPart(num_running=4, placed_tokens=80))))
    d.post(MovesAsked(d.s, None, 0))
    assert [move.target.link for move in d.moves()] == [idle]


def test_a_worker_that_becomes_a_prefill_worker_is_no_target() -> None:
    d = Moves()
    d.run_on_s()
    d.post(RoleAsked(d.attach_t(), Role.PREFILL, 1))
    assert d.ask() == []
    d.attach("d2")
    d.post(DrainAsked(d.s))
    assert [move.target.worker_id for move in d.moves()] == ["d2"]


def test_a_move_whose_target_breaks_the_protocol_is_counted() -> None:
    d = Moves()
    d.moving()
    d.tokens(d.t, RequestId((1).to_bytes(16)), 2, 9, attempt=1, index=3)
    assert d.core.placements.shadows.ended == {"internal": 1}


def test_what_an_order_names_stays_named_until_it_has_left() -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    request = d.moving()
    d.wait(1.5)
    d.post(LoadReported(d.s, ReportedLoad(100)))
    assert d.moves() == []
    d.fail(d.t, request, Failure.OVERLOADED, attempt=1)
    d.wait(6.0)
    d.post(LoadReported(d.s, ReportedLoad(100)))
    assert [move.spec.attempt for move in d.moves()] == [2]


def test_an_order_ends_with_its_target() -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    d.run_on_s()
    d.attach_t(num_pages=1)
    assert d.ask() == []
    d.post(LinkLost(d.t, "died"))
    d.post(LoadReported(d.s, ReportedLoad(100)))
    (warning,) = [each.text for each in d.last if isinstance(each, Warn)]
    assert warning == "d0 keeps what an operator asked to move: its target has left"
    d.post(LoadReported(d.s, ReportedLoad(100)))
    assert d.last == []


def test_the_bytes_of_a_move_do_not_count_twice() -> None:
    d = Moves(Limits(worker_silence_s=1e6))
    d.attach_t()
    num_tokens = len(PROMPT) + 2
    rate = num_tokens * LAYOUT.page_bytes / LAYOUT.page_size / 2.0
    d.post(PairMeasured(d.s, WorkerId("d1"), rate, "tcp", is_slow=False))
    extra_tokens = []
    for _ in range(4):
        request = d.run_on_s(max_tokens=900)
        (move,) = d.ask()
        extra_tokens.append(move.extra_tokens)
        d.wait(2.1)
        d.stage(d.t, request, Stage.COMMITTED, attempt=1)
        d.tokens(d.t, request, 2, 9, attempt=1, end=STOP)
    assert max(extra_tokens) < 1.1 * extra_tokens[0]


def test_a_full_target_is_looked_at_once_for_continuations_that_need_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks, decode_step = 0, Predictor.decode_step

    def counted(self: Predictor, worker: WorkerView, prompt: Prompt) -> tuple[float, Cause | None]:
        nonlocal num_looks
        num_looks += 1
        return decode_step(self, worker, prompt)

    monkeypatch.setattr(Predictor, "decode_step", counted)
    d = Moves()
    for _ in range(8):
        d.run_on_s()
    for name in ("d1", "d2", "d3"):
        full = d.attach(name)
        d.post(LoadReported(full, ReportedLoad(0, others=LoadPart(num_running=8, placed_tokens=1600))))
    d.post(DrainAsked(d.s))
    assert d.moves() == []
    assert num_looks == 3
