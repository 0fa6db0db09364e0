"""Answers that move between running workers: no token is lost, doubled or changed, whatever fails at any stage."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import moving
import pytest
from live_cluster import all_ready, greedy, is_idle
from model_zoo import assert_right, prompt
from moving import MOVED_WITHIN_S, POOLS, STAGES, Running, is_message, long_answer, num_moved, num_tried
from transformers import PreTrainedModel
from wired_cluster import WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference

pytestmark = [pytest.mark.slow, pytest.mark.long]

# A small model whose steps wait: an answer lasts as long as one of a larger model, and leaves the processors to others.
WORKER_FLAGS = {**moving.WORKER_FLAGS, "test_step_s": 0.006}
NUM_WORKERS = 3
DRAINED = 800  # tokens of an answer of a worker that drains


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, POOLS, WORKER_FLAGS) as cluster:
        yield cluster


def is_well(status: admin.ClusterStatus) -> bool:
    return all_ready(NUM_WORKERS)(status) and is_idle(status)


@pytest.fixture
def cluster(shared: WiredCluster) -> Iterator[WiredCluster]:
    shared.wait_for(is_well, 60)
    shared.introduce()
    moving.introduce(shared)
    shared.wait_for(is_well, 10)
    yield shared
    status = shared.wait_for(is_well, 60)
    assert [worker.load.pages_leaked for worker in status.workers] == [0] * NUM_WORKERS


SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_k": 50, "seed": 11},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 12},
    "with log probabilities": {"temperature": 0.7, "logprobs": 3, "seed": 13},
    "two of a prompt": {"temperature": 1.0, "n": 2, "seed": 14},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_moved_answer_is_the_one_that_was_not_moved(cluster: WiredCluster, name: str) -> None:
    sampling = inference.SamplingParams(max_tokens=200, ignore_eos=True, **SAMPLINGS[name])
    ids = inference.TokenIds(ids=prompt(150, name))
    request = inference.GenerateRequest(token_ids=ids, sampling=sampling)
    unmoved = cluster.generate(request)
    running = Running.of(cluster, request)
    count = SAMPLINGS[name].get("n", 1)
    assert running.move() == count
    cluster.wait_for(lambda status: num_moved(status) == num_moved(running.before) + count, MOVED_WITHIN_S)
    moved = running.end()
    assert moved.tokens == unmoved.tokens
    assert moved.finish == unmoved.finish
    for index, entries in unmoved.logprobs.items():
        for one, other in zip(moved.logprobs[index], entries, strict=True):
            assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
            assert [top.token_id for top in one.top] == [top.token_id for top in other.top]
    assert moved.ledger.attempts == 1
    assert moved.ledger.decode_worker == running.target
    assert {(each.source, each.target) for each in moved.ledger.moves} == {(running.source, running.target)}
    assert {each.index for each in moved.ledger.moves} == set(range(count))


def kill(cluster: WiredCluster, running: Running, victim: str) -> None:
    """Kill a worker, and with it what is under way on the hand-off stream; say so as a launcher does."""
    cluster.kill(victim)
    running.proxy.reset()
    cluster.report_gone(victim)


# A worker lost in a stage of a move, and how often the request is placed again then. A target that is lost takes with
# it whether it goes on, so the router places again, unless the source has reported before that it does; a source is not
# missed once the target has the commit.
LOSSES = [
    *((stage, "source", int(stage != "after the commit")) for stage in STAGES),
    *((stage, "target", 1) for stage in STAGES),
]


@pytest.mark.parametrize(
    ("stage", "who", "num_replaced"),
    LOSSES,
)
def test_a_worker_killed_in_any_stage_of_a_move_costs_no_token(
    cluster: WiredCluster, oracle: PreTrainedModel, stage: str, who: str, num_replaced: int
) -> None:
    asked, request = long_answer(f"killed {who} {stage}")
    running = Running.of(cluster, request)
    victim = running.source if who == "source" else running.target
    direction, kind = STAGES[stage]
    with running.proxy.holding(direction, is_message(direction, kind)) as gate:
        running.move()
        gate.wait_until_caught()
        kill(cluster, running, victim)
    cluster.wiring.start_again(victim)
    assert_right(oracle, asked, running.end().tokens[0], moving.LONG)
    may_be_reported = who == "target" and stage in ("before the grant", "while pages are copied")
    most = 2 * num_replaced  # the reset may cut the stream of the next placement, too
    assert num_replaced - may_be_reported <= running.num_replaced() <= most


@pytest.mark.parametrize("stage", STAGES)
def test_a_stream_cut_in_any_stage_of_a_move_costs_no_token(
    cluster: WiredCluster, oracle: PreTrainedModel, stage: str
) -> None:
    asked, request = long_answer(f"cut {stage}")
    running = Running.of(cluster, request)
    direction, kind = STAGES[stage]
    with running.proxy.holding(direction, is_message(direction, kind)) as gate:
        running.move()
        gate.wait_until_caught()
        running.proxy.reset()
    assert_right(oracle, asked, running.end().tokens[0], moving.LONG)


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_cancelled_in_any_stage_of_a_move_leaves_nothing_behind(cluster: WiredCluster, stage: str) -> None:
    _, request = long_answer(f"cancelled {stage}")
    running = Running.of(cluster, request)
    direction, kind = STAGES[stage]
    with running.proxy.holding(direction, is_message(direction, kind)) as gate:
        running.move()
        gate.wait_until_caught()
        running.call.cancel()
    cluster.wait_for(is_well, 10)


def test_copies_that_fail_leave_an_answer_where_it_is(model: Path, oracle: PreTrainedModel, tmp_path: Path) -> None:
    failing = {name: {"test_fail_copies": 1.0} for name in POOLS.decodes}
    with wired_cluster(tmp_path, model, POOLS, WORKER_FLAGS, own_flags=failing) as cluster:
        asked, request = long_answer("fails")
        running = Running.of(cluster, request)
        assert running.move() == 1
        cluster.wait_for(lambda status: num_tried(status) > num_tried(running.before), MOVED_WITHIN_S)
        answer = running.end()
        assert_right(oracle, asked, answer.tokens[0], moving.LONG)
        assert num_moved(cluster.status()) == 0
        assert answer.ledger.attempts == 1
        assert answer.ledger.decode_worker == running.source
        cluster.wait_for(is_well, 10)


def test_a_drained_worker_leaves_its_answers_running_elsewhere_and_exits(
    cluster: WiredCluster, oracle: PreTrainedModel
) -> None:
    asked = [prompt(100, f"drained {number}") for number in range(4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        others = [pool.submit(cluster.generate, greedy(each, DRAINED)) for each in asked[1:]]
        running = Running.of(cluster, greedy(asked[0], DRAINED))
        process, _ = cluster.wiring.started[running.source]
        drain = admin.DrainWorkerRequest(worker_id=running.source)
        cluster.admin.DrainWorker(drain, metadata=cluster.proof("DrainWorker", 10), timeout=10)
        assert process.wait(MOVED_WITHIN_S) == 0
        cluster.wiring.start_again(running.source)
        assert cluster.status().num_active == len(asked), "it waited for its answers"
        answers = [running.end(), *(other.result() for other in others)]
    for each, answer in zip(asked, answers, strict=True):
        assert_right(oracle, each, answer.tokens[0], DRAINED)
        assert answer.ledger.attempts == 1
    assert num_moved(cluster.status()) > num_moved(running.before)
