"""A whole cluster with certificates: it listens where the table says, to nobody without TLS, and certificates change
while it serves.
"""

import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from live_cluster import greedy, live_cluster
from proofs import operators_proof
from sockets import assert_listens_where_it_says
from tls_cluster import TlsCluster

from pdserve.certificates import Part, public_files
from pdserve.launch.admin import LauncherClient
from pdserve.launch.authority import write_certificates
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.rpc import split_address

FLAGS = ("--dtype", "float32", "--num-pages", "100", "--tls")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, *FLAGS) as plain:
        cluster = TlsCluster(plain)
        yield cluster
        cluster.close()


def test_it_listens_where_it_says(cluster: TlsCluster) -> None:
    assert_listens_where_it_says(cluster)


def test_no_port_but_metrics_and_health_answers_without_tls(cluster: TlsCluster) -> None:
    state = cluster.state
    handoffs = [each.registration.handoff_address for each in cluster.status().workers]
    for address in (state.endpoint, state.admin, state.launcher, *handoffs):
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/pdserve.v1.Identity/Hello")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_workers_certificate_and_the_secret_make_no_operator(cluster: TlsCluster) -> None:
    with cluster.dial(cluster.state.admin, Part.WORKER) as channel:
        proof = operators_proof(channel, cluster.state.secret_file, "GetStatus")
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/pdserve.v1.AdminService/GetStatus")(b"", metadata=proof, timeout=10)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.details() == "workers may not call /pdserve.v1.AdminService/GetStatus"
    assert cluster.status().refused["part"] == 1


async def test_certificates_change_while_it_serves(cluster: TlsCluster) -> None:
    state, asked = cluster.state, greedy([3, *range(5, 60)], 60)
    expected = cluster.generate(asked)
    running = cluster.start(asked)
    first = next(running)
    write_certificates(cluster.certificates, (), 1)
    shown = ssl.get_server_certificate(split_address(state.endpoint))  # type: ignore[arg-type]  # a port may be a text
    assert shown == public_files(cluster.certificates)[0].read_text()
    answer = type(expected)()
    answer.add(first)
    assert answer.read(running).tokens == expected.tokens
    with cluster.dial(state.endpoint) as channel:
        assert (
            type(expected)().read(InferenceServiceStub(channel).Generate(asked, timeout=60)).tokens == expected.tokens
        )
    status = await state.operator().status()
    assert len(status.workers) == 2
    assert not status.refused.get("secret")
    workers = await LauncherClient(state.launcher, state.secret_file, state.identity_dir).list_workers()
    assert len(workers) == 2
