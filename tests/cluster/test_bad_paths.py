"""Control streams that are cut or garbled cost no stream a token and no worker a page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import Faults
from live_cluster import Answer, all_ready, greedy, is_idle, load_of
from model_zoo import assert_right, prompt
from transformers import PreTrainedModel
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin

PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
WORKERS = (*PREFILLS, *DECODES)
FREED_WITHIN_S = 5
TRICKLE = Faults(bytes_per_s=5000, slice_bytes=100)  # some fifty tokens a second: a stream outlives what a test does
MODEL_SHAPE = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    flags = {"dtype": "float32", "max_num_batched_tokens": 128}
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, Pools(PREFILLS, DECODES), flags) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: WiredCluster) -> WiredCluster:
    shared.wait_for(lambda status: all_ready(len(WORKERS))(status) and is_idle(status), 30)
    return shared


def server_of(cluster: WiredCluster, names: tuple[str, ...]) -> str:
    """Return which of these workers has the one request."""
    busy = [w.registration.worker_id for w in cluster.status().workers if w.num_assigned]
    (name,) = set(busy) & set(names)
    return name


def set_links(cluster: WiredCluster, names: tuple[str, ...], faults: Faults) -> None:
    for name in names:
        cluster.proxies[f"link {name}"].set(faults)


def has_grants(status: admin.ClusterStatus) -> bool:
    return any(worker.load.pages_granted for worker in status.workers)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_link_that_is_reset_in_mid_stream_costs_no_token(
    cluster: WiredCluster, oracle: PreTrainedModel, role: str
) -> None:
    asked = prompt(50, role)
    set_links(cluster, DECODES, TRICKLE)
    try:
        call = cluster.start(greedy(asked, 200))
        answer = Answer()
        while len(answer.tokens.get(0, ())) < 20:
            answer.add(next(call))
        for name in PREFILLS if role == "prefill" else [server_of(cluster, DECODES)]:
            cluster.proxies[f"link {name}"].reset()
    finally:
        set_links(cluster, DECODES, Faults())
    answer.read(call)
    assert_right(oracle, asked, answer.tokens[0], 200)
    cluster.wait_for(is_idle, FREED_WITHIN_S)


@pytest.mark.parametrize("moment", ["before the grant", "while pages move"])
def test_a_hand_off_stream_that_is_reset_costs_no_token_and_no_page(
    cluster: WiredCluster, oracle: PreTrainedModel, moment: str
) -> None:
    asked = prompt(3500, moment)
    call = cluster.start(greedy(asked, 20))
    if moment == "while pages move":
        cluster.wait_for(has_grants, 10)
    for name in DECODES:
        cluster.proxies[f"handoff {name}"].reset()
    assert_right(oracle, asked, Answer().read(call).tokens[0], 20)
    cluster.wait_for(is_idle, FREED_WITHIN_S)


def test_garbled_streams_spoil_no_token_and_are_mended(cluster: WiredCluster, oracle: PreTrainedModel) -> None:
    garbled = Faults(corrupt_every=50)
    for proxy in cluster.proxies.values():
        proxy.set(garbled)
    cluster.wait_for(lambda status: not all_ready(len(WORKERS))(status), 10)
    for proxy in cluster.proxies.values():
        proxy.set(Faults())
        proxy.reset()
    start_again_what_grpc_ended(cluster)
    cluster.wait_for(lambda status: all_ready(len(WORKERS))(status) and is_idle(status), 30)
    for seed in range(4):
        asked = prompt(40, seed)
        assert_right(oracle, asked, cluster.generate(greedy(asked, 20)).tokens[0], 20)
    assert all(load_of(cluster.status(), name).num_digest_mismatches == 0 for name in DECODES)


def start_again_what_grpc_ended(cluster: WiredCluster) -> None:
    """Do a launcher's work: gRPC's core ends its process on some frames, such as a GOAWAY of an unknown error code."""
    ended = [name for name, (process, _) in cluster.wiring.started.items() if process.poll() is not None]
    for name in ended:
        log = cluster.wiring.log_of(name)
        assert "UNREACHABLE CODE" in log, log[-2000:]
        if name in WORKERS:
            cluster.report_gone(name)
        cluster.wiring.start_again(name)
