"""Sequences with a state that move between running workers, split into continuations, and are found by their prefix."""

from collections.abc import Iterator
from pathlib import Path

import moving
import pytest
from live_cluster import all_ready, greedy, is_idle
from model_zoo import assert_right, prompt
from moving import MOVED_WITHIN_S, POOLS, WORKER_FLAGS, Running, num_moved
from transformers import PreTrainedModel
from wired_cluster import WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

MODEL_FAMILY = "qwen3.5"
MODEL_SHAPE = {"hidden_size": 512, "intermediate_size": 2816}  # so that answers last as long as their moves
NUM_WORKERS = 3


def is_well(status: admin.ClusterStatus) -> bool:
    return all_ready(NUM_WORKERS)(status) and is_idle(status)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, POOLS, WORKER_FLAGS) as cluster:
        cluster.wait_for(is_well, 60)
        cluster.introduce()
        moving.introduce(cluster)
        yield cluster
        status = cluster.wait_for(is_well, 60)
        assert [worker.load.pages_leaked for worker in status.workers] == [0] * NUM_WORKERS


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "n": 2, "seed": 14}])
def test_a_moved_answer_is_the_one_that_was_not_moved(cluster: WiredCluster, sampling: dict[str, float]) -> None:
    params = inference.SamplingParams(max_tokens=700, ignore_eos=True, **sampling)
    ids = inference.TokenIds(ids=prompt(150, str(sampling)))
    request = inference.GenerateRequest(token_ids=ids, sampling=params)
    unmoved = cluster.generate(request)
    running = Running.of(cluster, request)
    count = sampling.get("n", 1)
    assert running.move() == count
    cluster.wait_for(lambda status: num_moved(status) == num_moved(running.before) + count, MOVED_WITHIN_S)
    moved = running.end()
    assert moved.tokens == unmoved.tokens
    assert moved.ledger.attempts == 1
    assert moved.ledger.decode_worker == running.target


def test_a_prefix_that_is_cached_with_its_snapshot_changes_no_token(
    cluster: WiredCluster, oracle: PreTrainedModel
) -> None:
    shared = prompt(400, "shared")
    for number in range(3):
        asked = [*shared, *prompt(30, f"own {number}")]
        answer = cluster.generate(greedy(asked, 40))
        assert_right(oracle, asked, answer.tokens[0], 40)
    assert answer.usage.cached_tokens >= 200
