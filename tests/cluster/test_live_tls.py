"""A whole cluster with certificates: it listens where the table says, to nobody without TLS, and certificates change
while it serves.
"""

import ssl
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest
from live_cluster import LiveCluster, greedy, live_cluster
from proofs import operators_proof
from scraping import scrape
from sockets import assert_listens_where_it_says

from pdserve.launch.authority import Authority, write_certificates
from pdserve.net.certificates import Part, public_files
from pdserve.net.operator_client import LauncherClient
from pdserve.net.rpc import split_address
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

FLAGS = ("--dtype", "float32", "--num-pages", "100", "--tls")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, *FLAGS) as cluster:
        yield cluster


def test_it_listens_where_it_says(cluster: LiveCluster) -> None:
    assert_listens_where_it_says(cluster)


def test_no_port_but_metrics_and_health_answers_without_tls(cluster: LiveCluster) -> None:
    state = cluster.state
    handoffs = [each.registration.handoff_address for each in cluster.status().workers]
    for address in (state.endpoint, state.admin, state.launcher, *handoffs):
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/pdserve.v1.Identity/Hello")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_workers_certificate_and_the_secret_make_no_operator(cluster: LiveCluster) -> None:
    with cluster.dial(cluster.state.admin, Part.WORKER) as channel:
        proof = operators_proof(channel, cluster.state.secret_file, "GetStatus")
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/pdserve.v1.AdminService/GetStatus")(b"", metadata=proof, timeout=10)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert refused.value.details() == "workers may not call /pdserve.v1.AdminService/GetStatus"
    assert cluster.status().refused["part"] == 1


PORTS = [("public", "router", None), ("internal", "router", Part.ROUTER), ("handoff", "decode-0", Part.WORKER)]


@pytest.mark.parametrize(("port", "process", "part"), PORTS)
def test_each_refused_connection_is_counted_and_no_other(
    cluster: LiveCluster, tmp_path: Path, port: str, process: str, part: Part | None
) -> None:
    state = cluster.state
    handoffs = {each.registration.worker_id: each.registration.handoff_address for each in cluster.status().workers}
    address = {"public": state.endpoint, "internal": state.admin}.get(port) or handoffs[process]
    (metrics_address,) = (each.metrics_address for each in state.processes if each.name == process)

    def num_without_call() -> float:
        found = scrape(metrics_address)
        opened = found.value("pdserve_tls_connections_total", port=port)
        return opened - found.value("pdserve_tls_connections_called_total", port=port)

    dials = [lambda: grpc.insecure_channel(address)]
    for shown in strangers(cluster, tmp_path, part):
        options = [] if part is None else [("grpc.ssl_target_name_override", part.host)]
        dials.append(partial(grpc.secure_channel, address, shown, options))
    for dial in dials:
        num_refused = num_without_call()
        for _ in range(2):
            served = status_of_hello(cluster.dial(address, part and Part.WORKER, part or Part.ROUTER))
            assert served is (grpc.StatusCode.UNIMPLEMENTED if part is None else grpc.StatusCode.UNAUTHENTICATED)
        assert num_without_call() == num_refused
        assert status_of_hello(dial()) is grpc.StatusCode.UNAVAILABLE
        assert num_without_call() > num_refused


def strangers(cluster: LiveCluster, folder: Path, part: Part | None) -> list[grpc.ChannelCredentials]:
    """Return what a listener with that part refuses: no certificate, an expired one, and another authority's."""
    if part is None:  # a client that takes the listener for a stranger
        return [grpc.ssl_channel_credentials(Authority.new().pem)]
    believed = Authority.read(cluster.certificates)
    believed.write_identity(folder / "expired", Part.WORKER, "pdserve", timedelta(days=-1))
    Authority.new().write_identity(folder / "foreign", Part.WORKER, "pdserve", timedelta(days=1))
    pairs = [
        [(folder / name / file).read_bytes() for file in ("tls.key", "tls.crt")] for name in ("expired", "foreign")
    ]
    return [grpc.ssl_channel_credentials(believed.pem, *shown) for shown in ([], *pairs)]


def status_of_hello(channel: grpc.Channel) -> grpc.StatusCode:
    """Return how a call ends that nobody serves."""
    with channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/pdserve.v1.Identity/Hello")(b"", timeout=10)
    code: grpc.StatusCode = refused.value.code()
    return code


async def test_certificates_change_while_it_serves(cluster: LiveCluster) -> None:
    state, asked = cluster.state, greedy([3, *range(5, 60)], 60)
    num_refused, expected = cluster.status().refused.get("secret", 0), cluster.generate(asked)
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
    assert status.refused.get("secret", 0) == num_refused
    workers = await LauncherClient(state.launcher, state.secret_file, state.identity_dir).list_workers()
    assert len(workers) == 2
