"""The goodput policy: predictions, admission, holding, and where a prompt is computed."""

import re
from collections import deque
from dataclasses import dataclass, replace

import pytest
from goodput_cluster import Cluster, placed, refused, refused_in_the_end

from pdserve.base.ids import Attempt, WorkerId
from pdserve.perfmodel.curve import Step
from pdserve.protocol.refusal import Cause, Status
from pdserve.protocol.reports import LoadPart, ReportedLoad
from pdserve.router.config import Limits
from pdserve.router.placement.policies import POLICIES
from pdserve.router.placement.predict import Predictor, Prompt
from pdserve.router.requests.commands import Place, Warn
from pdserve.router.requests.events import LinkLost, LoadReported, PairMeasured, StepReported, Tick


def test_a_request_goes_where_its_first_token_comes_soonest() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    first = placed(cluster.arrive(4000))
    second = placed(cluster.arrive(100))
    assert first.prefill is not None
    assert second.prefill is not None
    assert first.prefill.worker_id != second.prefill.worker_id


@pytest.mark.parametrize(("factor", "is_placed"), [(1.0, True), (1.2, False)])
def test_a_close_chance_is_left_in_a_crowd_by_what_predictions_missed_before(factor: float, is_placed: bool) -> None:
    cluster = Cluster(workers="p0 p1 d0")
    cluster.predictor.ttft_margin.factor = factor
    for _ in range(2):
        placed(cluster.arrive(50))
    commands = cluster.arrive(800, ttft_s=0.135)  # about 125 ms are predicted
    assert any(isinstance(command, Place) for command in commands) is is_placed


def test_a_close_chance_is_taken_where_nobody_waits() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    cluster.predictor.ttft_margin.factor = 1.2
    placed(cluster.arrive(800, ttft_s=0.105))  # 100 ms are predicted
    assert "cannot be met here" in refused(cluster.arrive(800, ttft_s=0.01)).message


def test_a_margin_that_predictions_missed_is_small_again_once_they_come_out() -> None:
    margin = Predictor().ttft_margin
    for _ in range(50):
        margin.observe(0.05, 0.1)
    assert margin.factor > 1.5
    for _ in range(100):
        margin.observe(0.05, 0.05)
    assert margin.factor < 1.1


def test_one_stall_does_not_keep_an_idle_cluster_from_serving() -> None:
    cluster = Cluster()
    for num_beside in [0, 1] * 11:  # answers that took five times what was predicted
        cluster.predictor.observe_answer(0.02, 19 * 0.1, 20, num_beside)
    assert [cluster.predictor.tpot_margin.factor(num_beside) for num_beside in range(3)] == [3.0, 3.0, 1.0]
    placed(cluster.arrive(100, tpot_s=0.045))
    assert cluster.arrive(100, tpot_s=0.045) == [], "beside another one the margin counts"


def test_a_burst_that_was_slow_keeps_no_second_answer_out() -> None:
    cluster = Cluster()
    for _ in range(11):
        cluster.predictor.observe_answer(0.02, 19 * 0.1, 20, num_beside=40)
    placed(cluster.arrive(100, tpot_s=0.045))
    placed(cluster.arrive(100, tpot_s=0.045))


def test_the_median_settles_however_many_first_tokens_are_still_to_come() -> None:
    predictor = Predictor()
    coming = deque([1.0] * 150)  # the medians at their placement
    medians = []
    for _ in range(2000):
        before = coming.popleft()
        predictor.observe_first_token(before * 1.0, 1.5, median=before)
        coming.append(predictor.ttft_median)
        medians.append(predictor.ttft_median)
    assert medians[-1000:] == pytest.approx([1.5] * 1000, rel=0.02)


def test_a_queue_that_is_too_long_is_answered_with_the_time_and_when_to_try_again() -> None:
    cluster = Cluster()
    for _ in range(8):
        placed(cluster.arrive(1000))
    answer = refused(cluster.arrive(1000, ttft_s=0.25))
    assert answer.status is Status.RESOURCE_EXHAUSTED
    assert answer.predicted_ttft_s == pytest.approx(9 * 0.12, rel=0.1)
    assert answer.retry_after_s == pytest.approx(9 * 0.12 - 0.25, rel=0.15)
    assert "try again in" in answer.message


def test_a_refusal_names_what_binds_with_the_figures_and_is_counted_by_it() -> None:
    cluster = Cluster()
    for _ in range(8):
        placed(cluster.arrive(1000))
    why = refused(cluster.arrive(1000, ttft_s=0.25))
    assert why.cause is Cause.QUEUE
    figures = re.search(r"would come after (\d+) ms, 250 were asked for", why.message)
    assert figures is not None
    assert int(figures[1]) == pytest.approx(9 * 120, rel=0.1)
    why = refused(cluster.arrive(1000, ttft_s=0.05))
    assert why.cause is Cause.IDLE_CLUSTER
    assert cluster.core.placements.refused_because == {Cause.QUEUE: 1, Cause.IDLE_CLUSTER: 1}


def test_what_even_an_idle_cluster_cannot_do_is_refused_with_what_it_can() -> None:
    answer = refused(Cluster().arrive(1000, ttft_s=0.05))
    assert "slo.ttft_ms: 50 ms cannot be met here: an idle cluster would need 12" in answer.message
    assert answer.retry_after_s is None
    slow = refused(Cluster().arrive(1000, tpot_s=0.001))
    assert "slo.tpot_ms" in slow.message
    assert slow.predicted_ttft_s == answer.predicted_ttft_s


def test_nothing_is_refused_before_the_model_has_seen_enough_nor_when_it_is_stale() -> None:
    assert placed(Cluster(knows=False).arrive(1000, ttft_s=0.001))
    cluster = Cluster()
    cluster.now_s += 60
    assert placed(cluster.arrive(1000, ttft_s=0.001))


def test_a_request_waits_for_a_decode_worker_for_a_moment_and_is_refused_then() -> None:
    cluster = Cluster()
    for _ in range(30):
        placed(cluster.arrive(10, max_tokens=1000))
    assert cluster.arrive(10, ttft_s=0.5, tpot_s=0.045) == []
    assert cluster.core.num_held == 1
    due_s = cluster.core.next_wakeup_s()
    assert due_s is not None
    assert cluster.now_s < due_s <= cluster.now_s + 0.02
    answer = refused_in_the_end(cluster, [])
    assert answer.status is Status.RESOURCE_EXHAUSTED
    assert answer.retry_after_s
    assert "slo.tpot_ms: no decode worker keeps 45 ms a token now" in answer.message
    assert cluster.now_s <= 100.0 + Limits().max_hold_s + 0.002
    assert cluster.core.num_held == 0


def test_looking_at_a_held_request_always_moves_time_on() -> None:
    cluster = Cluster()
    for _ in range(30):
        placed(cluster.arrive(10, max_tokens=1000))
    cluster.arrive(10, ttft_s=0.5, tpot_s=0.045)
    for _ in range(100):
        due_s = cluster.core.next_wakeup_s()
        if due_s is None or not cluster.core.num_held:
            return
        assert due_s > cluster.now_s
        cluster.now_s = due_s
        cluster.post(Tick())


def test_a_decode_worker_computes_a_prompt_itself_where_the_queue_is_long() -> None:
    cluster = Cluster(local=True)
    for _ in range(20):
        cluster.arrive(4000, max_tokens=1)
    place = placed(cluster.arrive(200, ttft_s=0.3, tpot_s=0.1))
    assert place.prefill is None
    assert place.decode is not None


@pytest.mark.parametrize(
    ("workers", "share", "is_placed"), [("p0 d0", 0.7, True), ("p0 d0", 0.9, False), ("d0", 0.9, True)]
)
def test_prompts_leave_decode_workers_room_for_hand_offs(workers: str, share: float, is_placed: bool) -> None:
    def crowded() -> Cluster:
        cluster = Cluster(workers=workers, local=True)
        for _ in range(20):
            cluster.arrive(4000 if "p0" in workers else 10, max_tokens=1 if "p0" in workers else 100)
        return cluster

    cluster = crowded()
    place = placed(cluster.arrive(200))
    assert place.prefill is None
    ttft_s, tpot_s = cluster.predicted_s(place)
    commands = crowded().arrive(200, ttft_s=2 * ttft_s, tpot_s=tpot_s / share)
    assert any(isinstance(command, Place) for command in commands) is is_placed


def test_a_prompt_that_may_not_take_the_room_of_hand_offs_is_told_so() -> None:
    cluster = Cluster(workers="p0 d0", local=True)
    for _ in range(20):
        cluster.arrive(4000, max_tokens=1)
    answer = refused_in_the_end(cluster, cluster.arrive(200, ttft_s=1.0, tpot_s=0.024))
    assert "decode workers compute prompts only while they keep 19 ms a token, of 24 asked for" in answer.message
    assert "leave the rest to hand-offs, by which the first token would come after" in answer.message
    assert answer.retry_after_s


def test_a_request_without_room_for_its_pages_is_told_so() -> None:
    cluster = Cluster()
    for _ in range(4):
        placed(cluster.arrive(3600, max_tokens=400))
    answer = refused_in_the_end(cluster, cluster.arrive(3600, ttft_s=60.0))
    assert "no decode worker has room for 3600 tokens and their answer now: free pages are too few" in answer.message


def test_decode_workers_alone_serve_when_they_may() -> None:
    for policy in POLICIES:
        cluster = Cluster(policy, workers="d0 d1", local=True)
        for max_tokens in (100, 1):
            place = placed(cluster.arrive(100, max_tokens=max_tokens))
            assert place.prefill is None
        assert cluster.core.is_ready
    assert refused(Cluster(workers="d0").arrive(100)).status is Status.UNAVAILABLE


def test_a_prefix_leads_to_the_worker_that_holds_it() -> None:
    cluster = Cluster(workers="p0 p1 p2 d0")
    prefix = list(range(2048))
    home = placed(cluster.arrive(tokens=[*prefix, 1])).prefill
    cluster.teach()
    for worker in cluster.core.workers:
        for key in tuple(worker.shares):
            worker.prefilled(key)
    place = placed(cluster.arrive(tokens=[*prefix, 2]))
    assert place.prefill == home


def test_an_interrupted_request_is_never_refused_for_its_objectives() -> None:
    cluster = Cluster(workers="p0 p1 d0")
    place = placed(cluster.arrive(1000, ttft_s=0.3))
    assert place.prefill is not None
    other = "p1" if place.prefill.worker_id == "p0" else "p0"
    cluster.now_s += 5.0
    cluster.teach()
    again = placed(cluster.post(LinkLost(place.prefill.link, "gone")))
    assert again.prefill is not None
    assert again.prefill.worker_id == other
    assert again.spec.attempt == Attempt(1)


def test_each_decision_tells_its_reason() -> None:
    cluster = Cluster()
    place = placed(cluster.arrive(1000))
    request = cluster.core.placements.requests[place.spec.request_id]
    assert "goodput, by hand-off: first token in 12" in request.ledger.decision
    assert "ms a token on d0" in request.ledger.decision
    assert request.ledger.decision.endswith("score 1.00"), "no objective can be missed"


def decision_of(cluster: Cluster, **terms: float) -> str:
    place = placed(cluster.arrive(1000, **terms))  # type: ignore[arg-type]
    return cluster.core.placements.requests[place.spec.request_id].ledger.decision


def test_the_score_of_a_placement_is_what_it_leaves_of_the_tighter_objective() -> None:
    assert decision_of(Cluster(), ttft_s=0.24).endswith("score 0.50"), "120 ms are predicted"
    assert decision_of(Cluster(), ttft_s=10.0, tpot_s=0.1).endswith(decision_of(Cluster(), tpot_s=0.1)[-4:])
    assert decision_of(Cluster(knows=False), ttft_s=0.001).endswith("score 0.00"), "taken without being sure"


def test_the_score_by_load_is_what_is_free() -> None:
    cluster = Cluster("least_loaded", workers="p0 d0")
    assert decision_of(cluster).endswith("score 1.00")
    assert decision_of(cluster).endswith(f"score {1 - 1000 / 4096:.2f}"), "of the longest prompt's room in the queue"


def test_a_pairs_own_measurement_is_what_hand_offs_are_predicted_from_and_a_slow_one_is_complained_of() -> None:
    cluster = Cluster()
    pair = PairMeasured(cluster.links["p0"], WorkerId("d0"), 2e8, "tcp", is_slow=True)
    (complaint,) = cluster.post(pair)
    assert complaint == Warn("SLOW: pages of p0 reach d0 at 200 MB/s, carrier: tcp")
    assert cluster.predictor.links.bytes_per_s(("p0", "d0")) == 2e8
    assert cluster.post(replace(pair, is_slow=False)) == []


def predicted_step_s(num_running: int, num_coming: int, after_s: float) -> float:
    """Return how long a step would be for a request that joins a decode worker with so many after so long."""
    cluster = Cluster()
    cluster.predictor.lengths.tokens.value = 10.0
    others = LoadPart(num_running=num_running, num_coming=num_coming)
    cluster.post(LoadReported(cluster.links["d0"], ReportedLoad(1000, others=others)))
    worker = cluster.core.workers.known(cluster.links["d0"])
    return cluster.predictor.decode_step(worker, Prompt(100, 1, {}), after_s)[0]


def test_what_waits_far_ahead_of_a_request_has_ended_before_it_decodes() -> None:
    alone_s, life_s = predicted_step_s(0, 0, 0), 10 * 0.045  # with some 25 sequences
    assert predicted_step_s(10, 10, 0) == pytest.approx(alone_s + 20e-3, rel=0.02), "all of it is there in no time"
    assert predicted_step_s(20, 0, 20 * life_s) == pytest.approx(alone_s, rel=0.02)
    long_queue_s = predicted_step_s(10, 20, 2 * life_s)  # as many come in a life as are here
    assert long_queue_s == pytest.approx(alone_s + 10e-3, rel=0.05)


@dataclass(frozen=True)
class FirstToken:
    """As it comes off the wire."""

    request_id: bytes
    attempt: int = 0
    index: int = 0
    position: int = 0
    token_ids: tuple[int, ...] = (7,)
    logprobs: tuple[object, ...] = ()
    finish_reason: int = 0
    drafts: tuple[object, ...] = ()


@pytest.mark.parametrize("ttft_s", [None, 60.0, 0.2])
def test_each_first_token_teaches_the_margin_whatever_was_asked_for(ttft_s: float | None) -> None:
    cluster = Cluster()
    place = placed(cluster.arrive(1000, ttft_s=ttft_s))  # 120 ms are predicted
    cluster.now_s += 0.5
    step = Step(1000, 1000**2)
    cluster.post(StepReported(cluster.links["p0"], [FirstToken(place.spec.request_id)], step, 0.5))
    assert cluster.predictor.ttft_margin.num_observed == 1
