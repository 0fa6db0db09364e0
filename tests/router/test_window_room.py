"""What fits on workers whose layers have windows in part: routers count the pages that these need, and no others."""

from dataclasses import replace

import pytest

from pdserve.base.ids import PROTOCOL_VERSION, Attempt, AttemptKey, Incarnation, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Curve, DecodePiece, StepCosts
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.paging import PageOrder
from pdserve.protocol.refusal import Cause
from pdserve.protocol.reports import LoadPart, ReportedLoad
from pdserve.router.placement.predict import Predictor, Prompt
from pdserve.router.placement.routing import Workers
from pdserve.router.placement.view import Share, WorkerView
from pdserve.router.requests.events import LinkId, Registration

LENGTH, STEP_TOKENS = 131_072, 512
ALIKE = KvLayout("w", 12, 8, 64, 16, "bfloat16", others=(KvGroup("full too", 12, 8, 64, 16),))
SLIDING = replace(ALIKE, others=(KvGroup("window", 12, 8, 64, 16, window=128),))
SLIDING_PAGES = SLIDING.paging
COSTS = StepCosts(Curve(0.02, 1e-4, 0.0), (DecodePiece(None, Curve(0.02, 1e-3, 1e-9)),))


def worker(layout: KvLayout, num_pages: int, role: Role = Role.DECODE) -> WorkerView:
    process = LinkId(1), WorkerId("d"), Incarnation(1), role
    known = Registration(*process, PROTOCOL_VERSION, True, "m", layout, num_pages, 32, LENGTH, "", STEP_TOKENS)
    view = WorkerView(known, 0.0)
    view.report(ReportedLoad(num_pages))
    return view


def key(number: int) -> AttemptKey:
    return AttemptKey(RequestId(number.to_bytes(16)), Attempt(0))


def most_that_fit(layout: KvLayout, num_pages: int) -> int:
    """Return how many prompts of half the greatest length a router places on a decode worker at once."""
    view, predictor = worker(layout, num_pages), Predictor(dict.fromkeys(Role, COSTS))
    predictor.lengths.tokens.value = 100.0
    for count in range(32):
        _, lacks = predictor.decode_step(view, Prompt(LENGTH // 2, 1, {}))
        if lacks is not None:
            assert lacks is Cause.PAGES
            return count
        view.assign(key(count), Share(1, 0, kv_tokens=LENGTH // 2), 0.0)
    return 32


def test_nearly_twice_as_many_fit_where_half_the_layers_slide() -> None:
    num_pages = 6 * LENGTH // 16
    assert most_that_fit(ALIKE, num_pages) == 5
    assert most_that_fit(SLIDING, num_pages) == 11


def test_begun_pages_of_states_are_counted_once() -> None:
    state = KvGroup("state", 36, 2, 256, 3216, window=2, state_elements=12 * 4 * 256 * 3216)
    states = KvLayout("w", 12, 2, 256, 3216, "bfloat16", others=(state,))
    view, predictor = worker(states, 60), Predictor(dict.fromkeys(Role, COSTS))
    predictor.lengths.tokens.value = 200.0
    for count in range(29):  # of two pages each, as one page is not yet enough for another
        assert predictor.decode_step(view, Prompt(100, 1, {}))[1] is None, count
        view.assign(key(count), Share(1, 0, kv_tokens=100), 0.0)
    assert predictor.decode_step(view, Prompt(100, 1, {}))[1] is Cause.PAGES


def test_the_states_that_a_step_copies_take_memory_beside_pages() -> None:
    state = KvGroup("state", 36, 2, 256, 3216, window=2, state_elements=12 * 4 * 256 * 3216)
    states = KvLayout("w", 12, 2, 256, 3216, "bfloat16", others=(state,))
    assert states.memory_bytes(60, 8) == 68 * states.page_bytes
    assert states.memory_bytes(60, 256) == 90 * states.page_bytes, "a sequence takes two pages"
    assert SLIDING.memory_bytes(60, 8) == 60 * SLIDING.page_bytes


def test_many_of_several_lengths_count_as_no_fewer_pages_than_they_have() -> None:
    lengths = (10, 100, 500, 3000, 40_000)
    assert SLIDING_PAGES.mean_pages(sum(lengths), len(lengths)) + 2 * len(lengths) >= sum(
        map(SLIDING_PAGES.most_pages, lengths)
    )
    assert ALIKE.paging.mean_pages(1600, 3) == 200


def test_the_longest_prompt_of_a_worker_is_what_its_windows_let_it_compute() -> None:
    most = SLIDING_PAGES.most_pages(LENGTH, STEP_TOKENS)
    assert most < 0.52 * ALIKE.paging.most_pages(LENGTH, STEP_TOKENS)
    assert worker(SLIDING, most).max_num_tokens == LENGTH
    assert worker(SLIDING, most - 1).max_num_tokens == LENGTH - 16
    assert worker(ALIKE, most).max_num_tokens < 0.52 * LENGTH


def test_a_worker_is_given_no_role_that_it_would_refuse_for_the_longest_steps_of_another_role() -> None:
    """A decode worker's steps are short; the room that a mixed one keeps for prompts is that of long ones."""
    told = replace(
        worker(SLIDING, 2 * SLIDING_PAGES.most_pages(LENGTH, STEP_TOKENS)).registration, most_step_tokens=2048
    )
    most = SLIDING_PAGES.most_pages(LENGTH, 2048)
    assert told.num_pages < 2 * most
    for num_pages, why in ((told.num_pages, f"{2 * most}, as mixed workers do"), (2 * most, "")):
        workers = Workers("m")
        view = workers.register(replace(told, num_pages=num_pages), 0.0)
        view.report(ReportedLoad(num_pages))
        assert why in (refusal := workers.role_refusal(view, Role.MIXED, force=True))
        assert bool(why) == bool(refusal)
        assert view.max_num_tokens == LENGTH


@pytest.mark.parametrize("layout", [ALIKE, SLIDING])
@pytest.mark.parametrize("length", [1, 100, 128, 129, 5000, LENGTH])
def test_the_bytes_of_a_hand_off_are_predicted_to_a_page_of_each_group(layout: KvLayout, length: int) -> None:
    sent = PageOrder(layout.paging, length).count(length) * layout.page_bytes
    assert 0 <= sent - layout.sent_bytes(length) <= 2 * len(layout.paging.sizes) * layout.page_bytes


def test_a_hand_off_of_a_model_with_windows_takes_half_as_long() -> None:
    predictor, taken = Predictor(dict.fromkeys(Role, COSTS)), []
    for layout in (ALIKE, SLIDING):
        prefill, decode = worker(layout, 10_000, Role.PREFILL), worker(layout, 10_000)
        (left_s,) = predictor.handoffs_s(prefill, [decode], Prompt(LENGTH, 1, {}), LENGTH - 1)
        taken.append(left_s - predictor.links.latency_s)
    assert taken[1] / taken[0] == pytest.approx(0.5, rel=0.01)


def test_others_load_counts_in_the_pages_of_sequences_as_long_as_theirs() -> None:
    view, predictor = worker(SLIDING, 5000), Predictor(dict.fromkeys(Role, COSTS))
    predictor.lengths.tokens.value = 10.0
    for count, num_tokens, fits in ((2, 60_000, True), (30, 60_000, True), (2, 90_000, False), (30, 75_000, False)):
        others = LoadPart(num_running=count, placed_tokens=num_tokens)
        view.report(ReportedLoad(5000, others=others))
        assert (predictor.decode_step(view, Prompt(100, 1, {}))[1] is None) is fits
