"""A whole cluster with certificates: it listens where the table says, to nobody without TLS, and certificates change
while it serves.
"""

import ssl
from collections.abc import Iterator

import grpc
import pytest
from live_cluster import LiveCluster, greedy, live_cluster
from model_zoo import write_model
from proofs import operators_proof
from sockets import assert_listens_where_it_says

from pdserve.certificates import IDENTITY_FILES, Part, public_files
from pdserve.launch.admin import AdminClient
from pdserve.launch.authority import write_certificates
from pdserve.launch.launcher import LauncherClient
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.rpc import split_address

FLAGS = ("--dtype", "float32", "--num-pages", "100", "--tls")


class TlsCluster(LiveCluster):
    """A cluster that was started with `--tls`."""

    def __init__(self, plain: LiveCluster) -> None:
        self.__dict__.update(plain.__dict__)
        self.folder = self.state.identity_dir.parent
        self.channel = self.dial(self.state.endpoint)
        self.inference = InferenceServiceStub(self.channel)
        self._admin_channel = self.dial(self.state.admin, Part.OPERATOR)
        self.admin = AdminServiceStub(self._admin_channel)

    def dial(self, address: str, part: Part | None = None) -> grpc.Channel:
        """Dial as a client, or as a process with a part."""
        authority = (self.folder / "ca.crt").read_bytes()
        if part is None:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
        certificate, key, _ = ((self.folder / part / name).read_bytes() for name in IDENTITY_FILES)
        shown = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(address, shown, [("grpc.ssl_target_name_override", Part.ROUTER.host)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    model = write_model("llama3", tmp_path_factory.mktemp("model") / "llama3")
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, *FLAGS) as plain:
        plain.close()
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
    write_certificates(cluster.folder, (), 1)
    shown = ssl.get_server_certificate(split_address(state.endpoint))  # type: ignore[arg-type]  # a port may be a text
    assert shown == public_files(cluster.folder)[0].read_text()
    answer = type(expected)()
    answer.add(first)
    assert answer.read(running).tokens == expected.tokens
    with cluster.dial(state.endpoint) as channel:
        assert (
            type(expected)().read(InferenceServiceStub(channel).Generate(asked, timeout=60)).tokens == expected.tokens
        )
    status = await AdminClient(state.admin, state.secret_file, state.identity_dir).status()
    assert len(status.workers) == 2
    assert not status.refused.get("secret")
    workers = await LauncherClient(state.launcher, state.secret_file, state.identity_dir).list_workers()
    assert len(workers) == 2
