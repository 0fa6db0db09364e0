"""What clients leave behind: nothing."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from live_cluster import Answer, LiveCluster, all_ready, greedy, is_idle, live_cluster
from model_zoo import assert_right, prompt
from transformers import PreTrainedModel

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

FREED_WITHIN_S = 2
LONG = 3000  # tokens: some seconds of work, for the small model too
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0),)  # 64 KiB; else it grows to what a slow machine fills in a minute
MODEL_SHAPE = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "64")
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, *flags) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_well_before(cluster: LiveCluster) -> None:
    cluster.wait_for(lambda status: all_ready(2)(status) and is_idle(status), 60)


class Bystanders:
    """Streams of other clients, which nothing may disturb."""

    def __init__(self, cluster: LiveCluster, oracle: PreTrainedModel, count: int = 4, max_tokens: int = 800) -> None:
        self._oracle = oracle
        self._max_tokens = max_tokens
        self._prompts = [prompt(20, seed) for seed in range(count)]
        self._pool = ThreadPoolExecutor(count)
        requests = [greedy(asked, max_tokens) for asked in self._prompts]
        self._answers = [self._pool.submit(cluster.generate, request) for request in requests]

    def assert_undisturbed(self) -> list[Answer]:
        answers = [answer.result() for answer in self._answers]
        self._pool.shutdown()
        for asked, answer in zip(self._prompts, answers, strict=True):
            assert_right(self._oracle, asked, answer.tokens[0], self._max_tokens)
        return answers


def prefilling(status: admin.ClusterStatus) -> bool:
    return any(w.load.waiting_tokens > 0 for w in status.workers if w.registration.worker_id.startswith("prefill"))


def transferring(status: admin.ClusterStatus) -> bool:
    return any(w.load.pages_granted > 0 for w in status.workers)


@pytest.mark.parametrize(
    "moment", [prefilling, pytest.param(transferring, marks=pytest.mark.long)], ids=["mid-prefill", "mid-transfer"]
)
def test_a_cancelled_prompt_frees_every_page(cluster: LiveCluster, oracle: PreTrainedModel, moment: object) -> None:
    others = Bystanders(cluster, oracle, max_tokens=300)
    call = cluster.start(greedy(prompt(4000), 50))
    cluster.wait_for(moment, 10)
    call.cancel()
    others.assert_undisturbed()
    cluster.wait_for(is_idle, FREED_WITHIN_S)


def test_a_client_that_does_not_read_is_cut_off_and_nobody_else_waits(
    cluster: LiveCluster, oracle: PreTrainedModel
) -> None:
    request = greedy(prompt(40), LONG, n=8, logprobs=20)
    with grpc.insecure_channel(cluster.endpoint, options=SMALL_WINDOW) as channel:
        call = InferenceServiceStub(channel).Generate(request, timeout=120)
        call.initial_metadata()  # it has begun
        others = Bystanders(cluster, oracle, max_tokens=300)
        others.assert_undisturbed()
        cluster.wait_for(is_idle, 60)  # it was ended although nobody read a word
        with pytest.raises(grpc.RpcError) as error:
            list(call)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_hundred_requests_end_as_the_status_says(cluster: LiveCluster) -> None:
    before = cluster.status().ended["OK"]
    requests = [
        inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt(i % 37 + 1, i)),
            sampling=inference.SamplingParams(max_tokens=i % 9 + 1, n=i % 3 + 1, ignore_eos=True),
        )
        for i in range(100)
    ]
    for i, answer in enumerate(cluster.generate_all(requests)):
        assert answer.usage.completion_tokens == (i % 9 + 1) * (i % 3 + 1)
    status = cluster.wait_for(is_idle, FREED_WITHIN_S)
    assert status.ended["OK"] == before + 100
