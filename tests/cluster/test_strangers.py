"""Workers that do not belong, by secret or protocol, get nothing and spoil nothing."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from live_cluster import all_ready, greedy, is_idle
from model_zoo import first_disagreement
from transformers import PreTrainedModel
from wired_cluster import HOST, Pools, WiredCluster, wired_cluster

from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.proto.v1 import admin_pb2 as admin

pytestmark = pytest.mark.long

OTHER_VERSION = PROTOCOL_VERSION + 1
OF_ANOTHER_VERSION = (
    f"from pdserve.base import ids; ids.PROTOCOL_VERSION = {OTHER_VERSION}; from pdserve.cli.app import main; main()"
)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    flags = {"dtype": "float32", "num_pages": 400}
    pools = Pools(("prefill-0",), ("decode-0",))
    grace = {"pool_grace_s": 3.0}  # of which one test waits for the end
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, pools, flags, grace) as cluster:
        yield cluster


def start(cluster: WiredCluster, name: str, role: str = "decode", **flags: object) -> subprocess.Popen[bytes]:
    """Start a worker that has no place in the cluster."""
    return cluster.wiring.start_worker(role, name, f"{HOST}:{cluster.wiring.internal_port}", **flags)


def until_logged(cluster: WiredCluster, name: str, part: str) -> None:
    """Wait until a process has logged this; its end before that is a failure."""
    process, _ = cluster.wiring.started[name]
    while part not in cluster.wiring.log_of(name):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            raise AssertionError(cluster.wiring.log_of(name))


def unroutable(status: admin.ClusterStatus, name: str) -> str:
    return next((w.unroutable for w in status.workers if w.registration.worker_id == name), "")


def assert_serves(cluster: WiredCluster, oracle: PreTrainedModel) -> None:
    """The workers that belong together serve, and no others."""
    asked = [[seed, *range(5, 60)] for seed in range(10, 16)]
    answers = cluster.generate_all([greedy(each, 20) for each in asked])
    for each, answer in zip(asked, answers, strict=True):
        assert first_disagreement(oracle, each, answer.tokens[0]) is None
        assert (answer.ledger.attempts, answer.ledger.decode_worker) == (1, "decode-0")
    cluster.wait_for(is_idle, 5)


def test_a_worker_with_another_secret_is_turned_away(cluster: WiredCluster, oracle: PreTrainedModel) -> None:
    secret_file = cluster.wiring.folder / "other_secret"
    secret_file.touch(mode=0o600)
    secret_file.write_text("x" * 64)
    stranger = start(cluster, "stranger", secret_file=secret_file)
    until_logged(cluster, "stranger", "UNAUTHENTICATED")
    assert {w.registration.worker_id for w in cluster.status().workers} == {"prefill-0", "decode-0"}
    assert_serves(cluster, oracle)
    until_logged(cluster, "stranger", " ready: ")  # a signal before that ends it at once
    stranger.terminate()
    assert stranger.wait(30) == 0


def test_a_worker_of_another_protocol_is_shown_and_not_used_even_where_there_is_no_other(
    cluster: WiredCluster, oracle: PreTrainedModel
) -> None:
    cluster.wiring.code = OF_ANOTHER_VERSION
    start(cluster, "other-version", "mixed", num_pages=1024)
    cluster.wiring.code = None
    difference = f"protocol_version: {OTHER_VERSION} != {PROTOCOL_VERSION}"
    cluster.wait_for(lambda status: difference in unroutable(status, "other-version"), 90)
    assert_serves(cluster, oracle)
    cluster.kill("decode-0")
    cluster.report_gone("decode-0")
    cluster.wait_for(lambda status: len(status.workers) == 2, 5)
    with pytest.raises(grpc.RpcError) as refused:
        cluster.generate(greedy([3, 4, 5], 5))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert difference in refused.value.details()
    cluster.wiring.start_again("decode-0")
    cluster.wait_for(all_ready(3), 90)
    assert_serves(cluster, oracle)
