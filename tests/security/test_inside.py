"""With certificates, internal ports serve whose part may make the call, and callers speak to whom they mean to dial."""

import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from pdserve.base.clock import VirtualClock
from pdserve.base.errors import ConfigError, PeerFault
from pdserve.launch.authority import Authority
from pdserve.net.certificates import CALLERS, Part, may_call, read_identity
from pdserve.net.credentials import PORT_KEPT_S, Connections, Credentials
from pdserve.net.rpc import HANDSHAKE_TIMEOUT_S, MAX_CONNECTIONS, identify

DAY = timedelta(days=1)
TRUST_DOMAIN = "c.example"
ATTACH, STATUS = "/pdserve.v1.LinkService/Attach", "/pdserve.v1.AdminService/GetStatus"
UNAVAILABLE, DENIED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED


class Cluster:
    """Folders of identities, and what processes with them make of each other."""

    def __init__(self, folder: Path, secret_file: Path, authority: Authority) -> None:
        self.folder = folder
        self.secret_file, self.secret = secret_file, secret_file.read_bytes()
        self.authority = authority

    def identity(self, part: Part, *, lifetime: timedelta = DAY, authority: Authority | None = None) -> Path:
        folder = self.folder / f"{part}-{len(list(self.folder.iterdir()))}"
        (authority or self.authority).write_identity(folder, part, TRUST_DOMAIN, lifetime)
        return folder

    def credentials(self, part: Part, **made: object) -> Credentials:
        return Credentials.read(self.secret_file, self.identity(part, **made), part)  # type: ignore[arg-type]


@pytest.fixture
def cluster(tmp_path: Path, secret_file: Path, authority: Authority) -> Cluster:
    return Cluster(tmp_path, secret_file, authority)


class Echoing(grpc.GenericRpcHandler):
    """Serves all methods: counts, as long as it is asked to."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        del details
        return grpc.stream_stream_rpc_method_handler(self._echo)

    async def _echo(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for message in messages:
            await context.write(message)


@asynccontextmanager
async def listening(credentials: Credentials, *, serves: bool = True) -> AsyncIterator[tuple[str, Counter[PeerFault]]]:
    denied: Counter[PeerFault] = Counter()
    server = credentials.server(lambda refusal: denied.update([refusal]))
    if serves:
        server.add_generic_rpc_handlers((Echoing(),))
    address = credentials.listen(server, "127.0.0.1", 0, "port")
    await server.start()
    try:
        yield address, denied
    finally:
        await server.stop(None)


async def call(caller: Credentials, address: str, method: str, listener: Part = Part.ROUTER) -> grpc.StatusCode:
    """Return how a call ends.

    It is sent whole, which an Attach is not: a write to a stream that the listener has just ended would end it here as
    an internal error.
    """
    try:
        async with caller.channel(address, listener) as channel:
            sent = channel.unary_unary(method)(b"x", metadata=await identify(channel, caller.secret, method, 10))
            await sent
            return await sent.code()
    except grpc.aio.AioRpcError as error:
        return error.code()


ALLOWED = {
    ATTACH: Part.WORKER,
    "/pdserve.v1.HandoffService/Attach": Part.WORKER,
    "/pdserve.v1.NodeService/Join": Part.WORKER,
    "/pdserve.v1.FrontendService/Attach": Part.FRONTEND,
    STATUS: Part.OPERATOR,
    "/pdserve.v1.LauncherService/StopWorker": Part.OPERATOR,
}


def allowed() -> Iterator[tuple[Part, str, bool]]:
    for method, caller in ALLOWED.items():
        for part in Part:
            yield part, method, part is caller


@pytest.mark.parametrize(("part", "method", "may"), list(allowed()))
async def test_a_part_calls_what_it_may_and_is_denied_all_else(
    cluster: Cluster, part: Part, method: str, may: bool
) -> None:
    async with listening(cluster.credentials(Part.ROUTER)) as (address, denied):
        code = await call(cluster.credentials(part), address, method)
    assert code is (grpc.StatusCode.OK if may else DENIED)
    assert denied == ({} if may else {PeerFault.PART: 1})


@pytest.mark.parametrize("method", [STATUS, "/pdserve.v1.AdminService/Other", "/pdserve.v1.Other/Method", ATTACH])
async def test_a_method_that_nobody_serves_is_denied_all_the_same(cluster: Cluster, method: str) -> None:
    async with listening(cluster.credentials(Part.ROUTER), serves=False) as (address, denied):
        code = await call(cluster.credentials(Part.WORKER), address, method)
    may = method == ATTACH
    assert code is (grpc.StatusCode.UNIMPLEMENTED if may else DENIED)
    assert denied == ({} if may else {PeerFault.PART: 1})


def test_what_is_in_no_row_of_the_table_nobody_may_call() -> None:
    for method in (
        "",
        "/",
        "/pdserve.v1.Other/Method",
        "/pdserve.v1.LinkServiceX/Attach",
        "pdserve.v1.LinkService/Attach",
    ):
        assert not any(may_call(part, method) for part in (None, *Part))
    assert not any(may_call(None, prefix + "Method") for prefix in CALLERS)


async def test_the_right_part_without_the_secret_is_denied(cluster: Cluster) -> None:
    caller = cluster.credentials(Part.WORKER)
    async with listening(cluster.credentials(Part.ROUTER)) as (address, denied):
        code = await call(Credentials(b"x" * 32, caller.identity), address, ATTACH)
    assert (code, denied) == (grpc.StatusCode.UNAUTHENTICATED, {PeerFault.SECRET: 1})


async def test_expired_foreign_and_missing_certificates_reach_no_method(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    expired = cluster.credentials(Part.WORKER, lifetime=-DAY)
    foreign = cluster.credentials(Part.WORKER, authority=Authority.new())
    async with listening(cluster.credentials(Part.ROUTER)) as (address, denied):
        for caller in (expired, expired, foreign, Credentials(cluster.secret)):
            assert await call(caller, address, ATTACH) is UNAVAILABLE
        assert caplog.text.count("identity_dir: the certificate ended at") == 1
        assert await call(cluster.credentials(Part.WORKER), address, ATTACH) is grpc.StatusCode.OK
    assert not denied


async def say_hello(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """Return how a call ends that the listener denies to whoever gets so far."""
    async with channel:
        return await channel.unary_unary("/pdserve.v1.Identity/Hello")(b"", timeout=10).code()


async def test_connections_that_fail_their_handshake_are_those_counted_as_without_a_call(cluster: Cluster) -> None:
    router, worker = cluster.credentials(Part.ROUTER), cluster.credentials(Part.WORKER)
    expired = cluster.credentials(Part.WORKER, lifetime=-DAY)
    foreign = cluster.credentials(Part.WORKER, authority=Authority.new())
    nameless = grpc.ssl_channel_credentials(cluster.authority.pem)
    renamed = [("grpc.ssl_target_name_override", Part.ROUTER.host)]
    counted = router.connections
    async with listening(router) as (address, denied):
        strangers = [
            lambda: expired.channel(address, Part.ROUTER),
            lambda: foreign.channel(address, Part.ROUTER),
            lambda: grpc.aio.secure_channel(address, nameless, options=renamed),
            lambda: grpc.aio.insecure_channel(address),
        ]
        for number, dial in enumerate(strangers):
            num_failed = counted.num_opened - counted.num_called
            assert await say_hello(dial()) is UNAVAILABLE
            assert counted.num_opened - counted.num_called > num_failed >= number
            num_failed = counted.num_opened - counted.num_called
            assert await call(worker, address, ATTACH) is grpc.StatusCode.OK
            assert await say_hello(worker.channel(address, Part.ROUTER)) is grpc.StatusCode.UNAUTHENTICATED
            assert await call(worker, address, STATUS) is DENIED
            assert counted.num_opened - counted.num_called == num_failed
            assert counted.num_called == 3 * (number + 1)
    assert denied == {PeerFault.SECRET: 4, PeerFault.PART: 4}


async def test_a_connection_counts_once_however_many_calls_it_makes(cluster: Cluster) -> None:
    router, worker = cluster.credentials(Part.ROUTER), cluster.credentials(Part.WORKER)
    async with listening(router) as (address, _), worker.channel(address, Part.ROUTER) as channel:
        for _ in range(3):
            await identify(channel, cluster.secret, ATTACH)
    assert (router.connections.num_opened, router.connections.num_called) == (1, 1)


def test_a_port_that_a_client_uses_again_is_another_connection_and_a_long_silence_is_none() -> None:
    clock = VirtualClock()
    counted = Connections(clock)
    for number in range(1, 4):
        counted.note_opened()
        counted.note_call("ipv4:192.0.2.1:4000")
        assert (counted.num_opened, counted.num_called) == (number, number)
        for silence_s in (1.0, PORT_KEPT_S - 1, 10 * PORT_KEPT_S):
            clock.advance(silence_s)
            counted.note_call("ipv4:192.0.2.1:4000")
        assert counted.num_called == number
        clock.advance(PORT_KEPT_S)
    counted.note_opened()  # of somebody who is refused
    clock.advance(HANDSHAKE_TIMEOUT_S + PORT_KEPT_S)
    counted.note_call("ipv4:192.0.2.1:4000")
    assert (counted.num_opened, counted.num_called) == (4, 3)


def test_no_more_callers_are_remembered_than_there_may_be_connections() -> None:
    counted = Connections()
    for number in range(2 * MAX_CONNECTIONS):
        counted.note_call("one that goes on")
        counted.note_call(f"another, {number}")
    assert counted.num_called == 1 + 2 * MAX_CONNECTIONS
    assert len(counted._callers) == MAX_CONNECTIONS


async def test_another_trust_domain_of_the_same_authority_is_another_cluster(cluster: Cluster) -> None:
    folder = cluster.folder / "elsewhere"
    cluster.authority.write_identity(folder, Part.WORKER, "other.example", DAY)
    async with listening(cluster.credentials(Part.ROUTER)) as (address, denied):
        code = await call(Credentials.read(cluster.secret_file, folder, Part.WORKER), address, ATTACH)
    assert (code, denied) == (DENIED, {PeerFault.PART: 1})


async def test_a_caller_speaks_to_nobody_who_is_not_what_it_dials(cluster: Cluster) -> None:
    caller = cluster.credentials(Part.WORKER)
    plain, expired = Credentials(cluster.secret), cluster.credentials(Part.ROUTER, lifetime=-DAY)
    for impostor in (cluster.credentials(Part.WORKER), expired, plain):
        async with listening(impostor) as (address, _):
            assert await call(caller, address, ATTACH, Part.ROUTER) is UNAVAILABLE


async def test_certificates_are_rotated_under_running_streams(cluster: Cluster) -> None:
    folders = {part: cluster.identity(part) for part in (Part.ROUTER, Part.WORKER)}
    router, worker = (Credentials.read(cluster.secret_file, folders[part], part) for part in folders)
    successor = Authority.new()
    async with listening(router) as (address, denied), worker.channel(address, Part.ROUTER) as channel:
        proof = await identify(channel, cluster.secret, ATTACH)
        running = channel.stream_stream(ATTACH)(metadata=proof)
        for number in range(4):
            if number == 2:
                for part, folder in folders.items():
                    successor.write_identity(folder, part, TRUST_DOMAIN, DAY)
            await running.write(b"%d" % number)
            assert await running.read() == b"%d" % number
        assert await call(worker, address, ATTACH) is grpc.StatusCode.OK
        assert await call(cluster.credentials(Part.WORKER), address, ATTACH) is UNAVAILABLE  # of the former authority
        await running.write(b"last")
        assert await running.read() == b"last"
    assert not denied


async def test_torn_or_senseless_files_leave_the_former_in_force(cluster: Cluster) -> None:
    folder, other = cluster.identity(Part.ROUTER), cluster.identity(Part.ROUTER)
    router, worker = Credentials.read(cluster.secret_file, folder, Part.ROUTER), cluster.credentials(Part.WORKER)
    assert router.identity is not None
    async with listening(router) as (address, _):
        for name in ("tls.crt", "tls.key", "ca.crt"):
            kept = (folder / name).read_bytes()
            for content in (b"", b"nonsense", (other / name).read_bytes()):
                if name == "ca.crt" and content.startswith(b"-"):
                    continue
                (folder / name).write_bytes(content)
                assert await call(worker, address, ATTACH) is grpc.StatusCode.OK
            (folder / name).write_bytes(kept)
        assert router.identity.num_refused >= 8
        (folder / "tls.crt").write_bytes((other / "tls.crt").read_bytes())
        assert await call(worker, address, ATTACH) is grpc.StatusCode.OK
        (folder / "tls.key").write_bytes((other / "tls.key").read_bytes())
        assert await call(worker, address, ATTACH) is grpc.StatusCode.OK
        assert router.identity.look().pair.certificate == (other / "tls.crt").read_bytes()


def test_an_identity_says_at_the_start_what_is_wrong_with_it(cluster: Cluster, authority: Authority) -> None:
    folder = cluster.identity(Part.WORKER)
    with pytest.raises(ConfigError, match=r"identity_dir: .* is of a worker, a router's is needed"):
        Credentials.read(cluster.secret_file, folder, Part.ROUTER)
    os.chmod(folder / "tls.key", 0o644)
    with pytest.raises(ConfigError, match=r"identity_dir: .*tls\.key has mode 0644"):
        read_identity(folder)
    os.chmod(folder / "tls.key", 0o440)
    (folder / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"identity_dir: cannot read .*ca\.crt"):
        read_identity(folder)
    authority.write_public(folder, ["worker.pdserve.internal"], DAY)
    (folder / "ca.crt").write_bytes(authority.pem)
    with pytest.raises(ConfigError, match=r"identity_dir: .* must name one URI"):
        read_identity(folder)
