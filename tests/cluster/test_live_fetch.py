"""The next turn of a conversation: what the decode worker holds of the past is fetched, not computed again."""

import random
from collections.abc import Iterator
from pathlib import Path

import moving
import pytest
from live_cluster import Answer, all_ready, greedy, is_idle
from model_zoo import VOCAB, assert_right
from transformers import PreTrainedModel
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin

POOLS = Pools(("prefill-0",), ("decode-0",))
PAGE_SIZE = 16
FLAGS = {"dtype": "float32", "page_size": PAGE_SIZE}
PREDICTS = {"placement": "goodput"}
FIRST, ANSWER, SAID = 200, 400, 30  # tokens: of the first prompt, of its answer, and of what is said then
MODEL_SHAPE = moving.MODEL_SHAPE

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, POOLS, FLAGS, PREDICTS) as cluster:
        cluster.introduce()
        for seed in range(3):  # the router learns what computing costs, and the two workers meet both ways
            second_turn(cluster, f"before {seed}")
        yield cluster


def is_well(status: admin.ClusterStatus) -> bool:
    return all_ready(2)(status) and is_idle(status)


@pytest.fixture
def cluster(shared: WiredCluster) -> Iterator[WiredCluster]:
    shared.wait_for(is_well, 60)
    yield shared
    shared.wait_for(is_well, 20)


def first_turn(cluster: WiredCluster, seed: object) -> list[int]:
    """Have an answer written; return a prompt that contains it."""
    rng = random.Random(f"fetch {seed}")
    asked = [rng.randrange(3, VOCAB) for _ in range(FIRST)]
    answer = cluster.generate(greedy(asked, ANSWER))
    cluster.wait_for(is_idle, 10)
    return [*asked, *answer.tokens[0], *(rng.randrange(3, VOCAB) for _ in range(SAID))]


def second_turn(cluster: WiredCluster, seed: object) -> tuple[list[int], Answer]:
    asked = first_turn(cluster, seed)
    return asked, cluster.generate(greedy(asked, 20))


def test_the_answer_before_is_fetched_from_the_worker_that_wrote_it(
    cluster: WiredCluster, oracle: PreTrainedModel
) -> None:
    asked, answer = second_turn(cluster, "fetched")
    assert_right(oracle, asked, answer.tokens[0], 20)
    assert answer.ledger.fetched_from == "decode-0"
    assert ANSWER - 2 * PAGE_SIZE <= answer.ledger.fetched_tokens <= ANSWER + PAGE_SIZE
    assert len(asked) - answer.usage.cached_tokens <= SAID + 2 * PAGE_SIZE
    assert answer.ledger.attempts == 1


def test_what_was_prepared_of_a_turn_is_neither_fetched_nor_computed(
    cluster: WiredCluster, oracle: PreTrainedModel
) -> None:
    rng = random.Random("prepared")
    asked = [rng.randrange(3, VOCAB) for _ in range(FIRST)]
    first = greedy(asked, ANSWER)
    first.session, first.prepare_next = "talk", True
    answer = cluster.generate(first)
    cluster.wait_for(is_idle, 10)
    later = [*asked, *answer.tokens[0], *(rng.randrange(3, VOCAB) for _ in range(SAID))]
    second = greedy(later, 20)
    second.session = "talk"
    answer = cluster.generate(second)
    assert_right(oracle, later, answer.tokens[0], 20)
    assert answer.ledger.fetched_from == ""
    assert len(later) - answer.usage.cached_tokens <= SAID + 2 * PAGE_SIZE


@pytest.mark.long
def test_a_holder_killed_in_the_middle_costs_a_computation_and_no_error(
    cluster: WiredCluster, oracle: PreTrainedModel
) -> None:
    asked = first_turn(cluster, "killed")
    with cluster.proxies["handoff prefill-0"].holding("onward", moving.is_message("onward", "commit")) as gate:
        call = cluster.start(greedy(asked, 20))
        gate.wait_until_caught()
        cluster.kill("decode-0")
        cluster.proxies["handoff prefill-0"].reset()
        cluster.report_gone("decode-0")
    cluster.wiring.start_again("decode-0")
    answer = Answer().read(call)
    assert_right(oracle, asked, answer.tokens[0], 20)
    assert answer.ledger.fetched_tokens == 0
    cluster.wait_for(is_well, 60)


@pytest.mark.long
def test_a_fetch_that_does_not_come_in_time_is_not_waited_for(cluster: WiredCluster, oracle: PreTrainedModel) -> None:
    asked = first_turn(cluster, "late")
    with cluster.proxies["handoff prefill-0"].holding("onward", moving.is_message("onward", "commit")) as gate:
        call = cluster.start(greedy(asked, 20))
        gate.wait_until_caught()
        answer = Answer().read(call)
    assert_right(oracle, asked, answer.tokens[0], 20)
    assert answer.ledger.fetched_tokens == 0
    assert answer.ledger.attempts == 1
