import re
import runpy
from pathlib import Path

import pytest
from mutations import MUTATIONS

from faultsim.simulation import simulate

MAX_SEEDS = 300  # several times what the slowest of them takes

# Raised where a mutation names what the code no longer has: that is no rule that was found broken.
OUT_OF_DATE = re.compile(r"(Attribute|Type|Name|Unbound\w*)Error\(")

# What seeds find too rarely, or what a second check makes up for, a test of the machine finds.
TESTS = Path(__file__).parents[1]
BY_TEST = {
    "place_where_an_adapter_is_not_loaded": (
        "router/test_adapters.py",
        "test_a_request_goes_to_workers_that_have_loaded_its_adapter",
    ),
    "accept_any_capability": ("kvtransfer/test_receiver.py", "test_a_forged_commit_changes_nothing"),
    "answer_whoever_means_another_incarnation": (
        "kvtransfer/test_greeting.py",
        "test_who_means_another_incarnation_is_refused",
    ),
    "work_with_whoever_answers": ("kvtransfer/test_dialling.py", "test_another_process_that_answers_is_refused"),
    "drop_what_is_said_before_a_stream_is_attached": (
        "kvtransfer/test_dialling.py",
        "test_what_is_said_early_is_sent_once_the_stream_is_attached",
    ),
    "take_a_process_with_a_successor_for_ended_though_it_was_heard": (
        "kvtransfer/test_roster.py",
        "test_an_attached_process_lives_whoever_follows_it_and_is_cut_off",
    ),
    "say_nothing_of_a_lost_link": (
        "router/test_dispatcher.py",
        "test_a_link_is_lost_once_and_nothing_is_sent_to_it_afterwards",
    ),
    "keep_pages_before_they_are_checked": (
        "workers/test_kept_pages.py",
        "test_pages_under_check_when_a_hand_off_ends_are_not_kept",
    ),
    "resume_a_continuation_whose_commit_has_left": (
        "workers/test_continuations_that_leave.py",
        "test_a_target_that_ends_after_the_commit_ends_the_attempt_here",
    ),
    "let_a_continuation_come_during_a_long_step": (
        "workers/test_arriving_moves.py",
        "test_it_is_offered_room_once_no_long_step_runs_and_decodes_on_meanwhile",
    ),
    "begin_a_long_step_before_a_continuation_comes": (
        "workers/test_arriving_moves.py",
        "test_prompts_are_computed_page_by_page_while_it_may_come",
    ),
    "release_fetched_pages_before_the_prompt_has_started": (
        "workers/test_fetches.py",
        "test_what_was_fetched_is_held_until_the_prompt_has_started",
    ),
    "keep_no_room_for_the_longest_prompt": (
        "workers/test_taking_roles.py",
        "test_a_decode_worker_computes_prompts_to_hand_off_once_the_room_for_them_is_free",
    ),
    "send_what_is_held_a_second_time": (
        "workers/test_step_reports.py",
        "test_each_token_and_each_cost_goes_once_in_order_and_in_time",
    ),
    "let_processes_attach_in_any_order": (
        "kvtransfer/test_roster.py",
        "test_an_earlier_process_is_refused_after_a_later_one",
    ),
}

CAUGHT_AT = {  # of the bugs that take seeds from 0 on long to find: where they were found last
    "take_whoever_attaches_for_the_successor": 15,
    "take_a_process_with_a_successor_for_ended_though_it_was_heard": 31,
    "let_processes_attach_in_any_order": 15,
    "take_tokens_of_both_attempts": 33,
    "free_when_the_stream_is_lost": 5,
    "free_quarantined_pages_after_a_time": 31,
    "free_when_the_lease_lapses": 6,
    "let_leases_never_lapse": 17,
    "accept_any_number_of_digests": 5,
    "end_a_dialled_stream_in_silence": 35,
    "dial_a_lost_router_no_more": 10,
    "keep_what_a_lost_router_asked_for": 27,
    "ignore_the_incarnation_on_decode_workers": 5,
    "take_one_process_gone_for_all_of_its_name": 15,
    "never_dial_a_lost_peer_again": 90,
    "never_wake_requests_that_wait_for_a_pair": 14,
    "give_pages_back_while_a_step_writes_them": 44,
    "forget_to_stop_the_other_worker": 4,
    "forget_a_cancel_of_a_hand_off_under_way": 6,
    "end_in_silence_when_the_source_gives_up": 4,
    "follow_a_role_of_a_smaller_epoch": 3,
    "leave_out_the_last_rank_of_a_receiver": 24,
    "take_digests_by_the_place_of_runs_on_their_rank": 24,
    "let_each_rank_send_and_count_all_that_others_hold_as_well": 88,
    "let_nobody_send_the_part_of_the_last_copy": 88,
    "take_the_end_of_the_first_rank_for_that_of_all": 10,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_fits_what_it_breaks(name: str) -> None:
    with MUTATIONS[name]():
        pass


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in BY_TEST or name in CAUGHT_AT])
def test_the_simulator_catches(name: str) -> None:
    for seed in (CAUGHT_AT.get(name, 0), *range(MAX_SEEDS)):
        with MUTATIONS[name]():
            violation = simulate(seed).violation
        if violation:
            assert not OUT_OF_DATE.search(violation), f"{name} no longer fits what it breaks: {violation}"
            return
    pytest.fail(f"{MAX_SEEDS} seeds passed in spite of {name}")


SLOW = "send_what_is_held_a_second_time"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == SLOW else ()) for name in BY_TEST]
)
def test_a_test_of_the_machine_catches(name: str) -> None:
    path, claim = BY_TEST[name]
    with MUTATIONS[name](), pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        runpy.run_path(str(TESTS / path))[claim]()
    runpy.run_path(str(TESTS / path))[claim]()


def test_a_seed_that_fails_tells_the_story_of_its_request() -> None:
    with MUTATIONS["write_into_shared_pages"]():
        outcome = simulate(0)
    name = re.findall("request-[0-9]+", outcome.violation)[0]
    about = outcome.story[: outcome.story.index("...")]
    assert len(about) > 5
    assert all(name in line for line in about)
    assert len(outcome.story) > len(about) + 1


def test_a_switched_off_mutation_leaves_nothing_behind() -> None:
    before = simulate(1, num_requests=40)
    for mutation in MUTATIONS.values():
        with mutation():
            pass
    assert simulate(1, num_requests=40) == before
