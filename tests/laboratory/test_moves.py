"""What a move costs a client, and which roles an operator leaves a cluster with."""

from dataclasses import replace

import pytest

from lab.conversation import ConversationFindings, ConversationPlan, Turn, medians
from lab.moves import MovesVerdict, Record, gaps_beside, moved_gaps, roles_of, serves
from pdserve.base.roles import Role
from pdserve.measure.chaos import tally
from pdserve.measure.outcomes import Outcome
from pdserve.measure.tables import compared
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.link import ROLE_NUMBERS
from pdserve.router.requests.timeline import Moved

PREFILL, DECODE, MIXED = Role


def outcome(times_s: list[float], *moves: Moved) -> Outcome:
    return Outcome(0.0, 10, len(times_s), times_s={0: times_s}, moves=moves)


def moved(num_tokens: int, index: int = 0) -> Moved:
    return Moved(index, num_tokens, "decode-0", "decode-1", 1000, 50.0)


def test_the_gap_of_a_move_is_that_between_the_tokens_around_it_and_the_step_that_of_the_others() -> None:
    (gap,) = moved_gaps(outcome([0.0, 0.1, 0.2, 0.7, 0.8, 0.9], moved(3)))
    assert (gap.gap_s, gap.step_s) == (pytest.approx(0.5), pytest.approx(0.1))
    assert gap.allowed_s == pytest.approx(0.35)


def test_tokens_that_come_with_the_move_itself_count_as_before_it() -> None:
    (gap,) = moved_gaps(outcome([0.0, 0.1, 0.2, 0.2, 0.6, 0.7, 0.8], moved(3)))
    assert gap.gap_s == pytest.approx(0.4)
    assert gap.first_s == 0.0


@pytest.mark.parametrize("move", [moved(2, index=1), moved(6), moved(40)])
def test_a_move_without_tokens_after_it_has_no_gap(move: Moved) -> None:
    times_s = [0.0, 0.1, 0.2, 0.3, 0.4]
    assert moved_gaps(outcome(times_s, move)) == []


def test_answers_that_did_not_move_are_looked_at_where_others_did() -> None:
    gaps = moved_gaps(outcome([0.0, 0.1, 0.2, 0.7, 0.8, 0.9], moved(3)))
    steady, ended, not_begun = [-0.2, 0.0, 0.2, 0.4, 0.8, 1.0, 1.2], [0.0, 0.1, 0.2], [0.2, 0.3, 0.5]
    waits_for_a_place = [0.1, 0.9, 1.0]
    (gap,) = gaps_beside(gaps, [steady, ended, not_begun, waits_for_a_place, []])
    assert (gap.at_s, gap.gap_s, gap.step_s) == (0.4, pytest.approx(0.4), pytest.approx(0.2))
    assert gap.allowed_s == pytest.approx(0.6), "no page of it was transferred"


@pytest.mark.parametrize(
    ("roles", "does"),
    [
        ((PREFILL, DECODE), True),
        ((MIXED, DECODE), True),
        ((MIXED, MIXED), True),
        ((MIXED,), False),
        ((PREFILL, PREFILL), False),
        ((DECODE, DECODE), False),
        ((), False),
    ],
)
def test_a_cluster_keeps_who_computes_prompts_and_who_decodes(roles: tuple[Role, ...], does: bool) -> None:
    assert serves(dict(zip("abc", roles, strict=False))) is does


def worker(name: str, role: Role | None, *, ready: bool = True, draining: bool = False) -> admin.WorkerStatus:
    registration = link.Register(worker_id=name, role=link.ROLE_PREFILL, ready=ready)
    reported = link.ROLE_UNSPECIFIED if role is None else ROLE_NUMBERS[role]
    return admin.WorkerStatus(registration=registration, load=link.Heartbeat(role=reported, draining=draining))


def test_a_worker_has_the_role_that_it_reported_last_and_none_while_it_loads_or_drains() -> None:
    workers = [
        worker("a", DECODE),
        worker("b", None),
        worker("c", DECODE, ready=False),
        worker("d", DECODE, draining=True),
    ]
    assert roles_of(admin.ClusterStatus(workers=workers)) == {"a": DECODE, "b": PREFILL}


def test_prompts_grow_to_the_length_of_the_last_turn() -> None:
    plan = ConversationPlan(turns=8, prompt_tokens=4000, answer_tokens=250, repeats=1, seed=0)
    assert plan.said_tokens * 8 + 250 * 7 == pytest.approx(4000, abs=8)


def test_a_turn_is_compared_with_the_cached_past_and_the_transfer_of_what_was_fetched() -> None:
    turns = (
        Turn("fetched", 2, 500, 60, 200, 0.30, 0.1, 0.0),
        Turn("cached", 2, 500, 60, 0, 0.20, 0.0, 0.0),
        Turn("computed", 2, 500, 260, 0, 0.50, 0.0, 0.0),
    )
    (turn,) = medians(ConversationFindings(turns, token_bytes=1000, bytes_per_s=2e6))
    assert turn.transfer_s == pytest.approx(0.1)
    assert turn.ratio == pytest.approx(1.0)


def test_a_verdict_shows_what_was_done_and_what_moves_cost() -> None:
    steady = outcome([0.0, 0.1, 0.2, 0.7, 0.8, 0.9], moved(3))
    steady.status, steady.ended_s = "OK", 1.0
    verdict = MovesVerdict(
        capacity_per_s=3.0,
        rate_per_s=2.1,
        tally=tally("moves", [steady]),
        moves={"done": 1, "refused": 2},
        record=Record(flips_s=[0.2, 0.3], drains_s=[4.0], is_complete=True),
        gaps=tuple(moved_gaps(steady)),
        beside=(),
        free_after_s=0.04,
        left_over="",
        num_ended=1,
    )
    assert verdict.is_clean
    rows = dict(compared([verdict.result]).rows)
    assert rows["done"] == ["2 flips, 1 drains, 0 starts"]
    assert rows["moves"] == ["1 done, 2 refused"]
    assert rows["move gap: p50 / p90 / p99 / max"] == ["500 / 500 / 500 / 500 ms"]
    assert rows["move gap over allowed: p50 / p90 / p99 / max"] == ["1.43 / 1.43 / 1.43 / 1.43"]
    assert rows["free after"] == ["40 ms"]
    assert not replace(verdict, num_ended=2).is_clean
