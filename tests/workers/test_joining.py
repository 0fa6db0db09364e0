"""A machine joins a worker only as one of the cluster's workers, with the worker's model, in its own place, in time."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from model_zoo import write_model

from pdserve import __version__
from pdserve.base.errors import CommandError, ConfigError, DeviceError
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.checkpoint.open import open_checkpoint
from pdserve.executor.device_names import devices_here
from pdserve.executor.joining import Node, Nodes, NodeServicer, RemoteRank, gathering
from pdserve.executor.worker_node import Carried, JoinCall, Leader, reached
from pdserve.launch.authority import Authority
from pdserve.launch.folder import free_port, write_secret
from pdserve.net.certificates import Part
from pdserve.net.credentials import Credentials
from pdserve.proto.v1 import nodes_pb2 as wire
from pdserve.settings.config import WorkerConfig, load_config
from pdserve.settings.degrees import Degrees

HOST = "127.0.0.1"
SETTINGS = {"nnodes": 2, "tensor_parallel_size": 2, "rank_memory": "own", "role": "decode", "worker_id": "w"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_model("llama3", tmp_path_factory.mktemp("model")))


@dataclass
class Worker:
    """A worker of two machines, which the second one is to join."""

    folder: Path
    checkpoint: Checkpoint
    authority: Authority = field(default_factory=Authority.new)
    num_leaving: int = 0
    port: int = field(default_factory=lambda: free_port(HOST))

    def __post_init__(self) -> None:
        self.secret = write_secret(self.folder)

    def identity(self, part: Part, authority: Authority | None = None) -> Credentials:
        folder = self.folder / f"{part}-{len(list(self.folder.iterdir()))}"
        (authority or self.authority).write_identity(folder, part, "pdserve", timedelta(days=1))
        return Credentials.read(self.secret, folder, part)

    @asynccontextmanager
    async def gathering(self, timeout_s: float = 20.0, **settings: object) -> AsyncIterator[Nodes | None]:
        own = {"model": "m", "secret_file": self.secret, "routers": ("127.0.0.1:1",), "master_port": self.port}
        config = load_config(WorkerConfig, flags={**SETTINGS, **own, "join_timeout_s": timeout_s, **settings})
        me = Peer(WorkerId("w"), Incarnation(7))
        async with gathering(config, me, self.checkpoint, self.identity(Part.WORKER), self._leaving) as nodes:
            yield nodes

    @asynccontextmanager
    async def dialled(
        self, credentials: Credentials | None = None, *, host: str = HOST, within_s: float = 20.0
    ) -> AsyncIterator[Leader]:
        async with reached(credentials or self.identity(Part.WORKER), f"{host}:{self.port}", within_s) as leader:
            yield leader

    def greeting(self, **own: object) -> wire.NodeGreeting:
        is_as = {"version": __version__, "node_rank": 1, "model": self.checkpoint.fingerprint}
        has = {"num_processors": 2, "devices": devices_here()}
        return wire.NodeGreeting(**{**is_as, "handoff_host": HOST, **has, **own})

    def _leaving(self) -> None:
        self.num_leaving += 1


@pytest.fixture
def worker(tmp_path: Path, checkpoint: Checkpoint) -> Worker:
    return Worker(tmp_path, checkpoint)


async def opened(leader: Leader, ticket: bytes) -> list[Carried]:
    return [await leader.open(ticket, 1, kind) for kind in (wire.RANK_SOCKET_STEPS, wire.RANK_SOCKET_ORDERS)]


async def joined(worker: Worker, leader: Leader) -> tuple[JoinCall, list[Carried]]:
    call, accepted = await leader.join(worker.greeting())
    assert (accepted.worker_id, accepted.incarnation, list(accepted.ranks)) == ("w", 7, [1])
    return call, await opened(leader, accepted.ticket)


WRONG = [
    ({"version": "0.0.0"}, r"version: '0\.0\.0' of pdserve, and the worker's own is"),
    ({"node_rank": 2}, r"node_rank: 2, and the worker has nodes 0 to 1 \(nnodes\)"),
    ({"node_rank": 0}, "node_rank: 0, and the worker has nodes 0 to 1"),
    ({"model": "another"}, "model: its files differ from the worker's: another, not "),
    ({"handoff_host": "10.0.0.1"}, r"handoff_host: 10\.0\.0\.1 and the worker's 127\.0\.0\.1 do not reach each other"),
    ({"devices": ["Another CPU"]}, "device: Another CPU, and the worker's .* may round otherwise"),
    ({"num_processors": 0}, "tensor_parallel_size: 1 ranks a node need as many processors, not 0"),
]


@pytest.mark.parametrize(("wrong", "refusal"), WRONG)
def test_a_machine_that_does_not_fit_is_refused_by_name(worker: Worker, wrong: dict[str, object], refusal: str) -> None:
    accepted = wire.NodeAccepted(model=worker.checkpoint.fingerprint, device=devices_here()[0])
    servicer = NodeServicer(Degrees(2, 1, 2), accepted, HOST, lambda: None)
    assert servicer.refusal_of(worker.greeting()) == ""
    assert re.match(refusal, servicer.refusal_of(worker.greeting(**wrong)))


async def test_a_refusal_is_told_at_both_ends(worker: Worker) -> None:
    refusal = "model: its files differ from the worker's: another, not "

    async def refused() -> None:
        async with worker.dialled() as leader:
            with pytest.raises(ConfigError, match=refusal):
                await leader.join(worker.greeting(model="another"))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refused())
        with pytest.raises(ConfigError, match=rf"join_timeout_s: nodes \[1\] have not joined within 2.*{refusal}"):
            await gather(worker, 2.0)


async def test_a_place_is_taken_once_and_free_again_when_its_machine_leaves_before_all_have_joined(
    worker: Worker,
) -> None:
    async with asyncio.TaskGroup() as tasks:
        gathered = tasks.create_task(gather(worker))
        async with worker.dialled() as first, worker.dialled() as second:
            call, accepted = await first.join(worker.greeting())
            with pytest.raises(ConfigError, match="node_rank: 1 has joined already"):
                await second.join(worker.greeting())
            call.cancel()
            ticket = await ticket_once_free(worker, second)
            stale = await second.open(accepted.ticket, 1, wire.RANK_SOCKET_STEPS)
            with pytest.raises(grpc.aio.AioRpcError, match="it opens no such socket of a rank now"):
                await stale.first_message()
            await opened(second, ticket)
            await gathered


async def ticket_once_free(worker: Worker, leader: Leader) -> bytes:
    """Join in place of a machine that has left."""
    while True:
        with suppress(ConfigError):
            return (await leader.join(worker.greeting()))[1].ticket
        await asyncio.sleep(0)


async def gather(worker: Worker, timeout_s: float = 20.0) -> None:
    async with worker.gathering(timeout_s) as nodes:
        assert nodes is not None
        assert 1 in nodes
        assert 0 not in nodes


async def test_a_machine_without_a_workers_identity_of_this_cluster_does_not_join(worker: Worker) -> None:
    own, stranger = worker.identity(Part.WORKER), worker.identity(Part.WORKER, Authority.new())
    wrong: list[tuple[Credentials, type[Exception], str]] = [
        (Credentials(os.urandom(40), own.identity), ConfigError, "secret_file: .* the cluster's shared secret"),
        (worker.identity(Part.ROUTER), ConfigError, "identity_dir: .* routers may not call"),
        (stranger, CommandError, "join_timeout_s: .* is not reached within 3 s: .*Tls handshake failed"),
        (Credentials(own.secret), CommandError, "join_timeout_s: .* is not reached within 3 s: "),  # it has none
    ]

    async def denied(credentials: Credentials, kind: type[Exception], problem: str) -> None:
        with pytest.raises(kind, match=problem):
            async with worker.dialled(credentials, within_s=3.0) as leader:
                await leader.join(worker.greeting())

    async with asyncio.TaskGroup() as tasks:
        for each in wrong:
            tasks.create_task(denied(*each))
        with pytest.raises(ConfigError, match=r"nodes \[1\] have not joined within 4 s$"):
            await gather(worker, 4.0)


@pytest.mark.parametrize(("host", "problem"), [("0.0.0.0", "names no interface"), ("10.9.9.9", "need identity_dir")])
async def test_an_address_that_names_no_interface_or_is_reached_without_identity_is_refused(
    worker: Worker, host: str, problem: str
) -> None:
    own = {"model": "m", "secret_file": worker.secret, "routers": ("127.0.0.1:1",), "handoff_host": host}
    config = load_config(WorkerConfig, flags={**SETTINGS, **own})
    plain, me = Credentials(worker.secret.read_bytes().strip()), Peer(WorkerId("w"), Incarnation(7))
    with pytest.raises(ConfigError, match=f"handoff_host: .*{problem}"):
        async with gathering(config, me, worker.checkpoint, plain, lambda: None):
            raise AssertionError("it listens")


async def test_bytes_of_a_ranks_socket_pass_both_ways_and_its_end_ends_it_at_the_other_machine(worker: Worker) -> None:
    long = os.urandom(5_000_000)
    async with asyncio.TaskGroup() as tasks:
        other = tasks.create_task(echoed(worker, len(long)))
        async with worker.gathering() as nodes:
            assert nodes is not None
            rank, steps, orders = nodes.start(1)
            await asyncio.to_thread(steps.sendall, (len(b"set up")).to_bytes(4, "big") + b"set up")
            sending = asyncio.to_thread(steps.sendall, long)
            received, _ = await asyncio.gather(asyncio.to_thread(read, steps, len(long)), sending)
            assert received == long
            steps.close()
            orders.close()
            assert await asyncio.to_thread(rank.wait, 10) == 0
            await other
    assert worker.num_leaving == 1


async def echoed(worker: Worker, count: int) -> None:
    """Be a machine with a rank that sends back what comes behind the first message, until its sockets are closed."""
    async with worker.dialled() as leader:
        call, (steps, orders) = await joined(worker, leader)
        assert await steps.first_message() == b"set up"
        pairs = socket.socketpair(), socket.socketpair()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(steps.carry(pairs[0][0]))
            tasks.create_task(orders.carry(pairs[1][0]))
            tasks.create_task(asyncio.to_thread(send_back, pairs[0][1], count))
        for pair in pairs:
            pair[1].close()
        await call.write(wire.JoinRequest(leaving=wire.NodeLeaving()))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass  # beats


async def test_what_a_rank_says_last_arrives_before_the_end_of_its_socket(worker: Worker) -> None:
    last = os.urandom(3_000_000)  # more than the relays hold

    async def end() -> None:
        async with worker.dialled() as leader:
            _, (steps, _) = await joined(worker, leader)
            connected, rank = socket.socketpair()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(steps.carry(connected))
                await asyncio.to_thread(rank.sendall, last)
                rank.close()

    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(end())
        async with worker.gathering() as nodes:
            assert nodes is not None
            _, steps, orders = nodes.start(1)
            steps.settimeout(20)
            await asyncio.sleep(1)  # the rank's socket ends while its bytes are on the way
            assert await asyncio.to_thread(read, steps, len(last) + 1) == last
            await ending
            steps.close()
            orders.close()


def read(connected: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count and (part := connected.recv(1 << 16)):
        received += part
    return bytes(received)


def send_back(connected: socket.socket, count: int) -> None:
    while part := connected.recv(1 << 16):
        connected.sendall(part)
        count -= len(part)
    assert count == 0


async def join_by(worker: Worker, host: str, gathered: "asyncio.Task[None]") -> None:
    """Be a machine that knows its worker by a name, until all have joined."""
    async with worker.dialled(host=host) as leader:
        call, sockets = await joined(worker, leader)
        await gathered
        assert not call.done()
        assert len(sockets) == 2


async def test_a_machine_waits_for_a_worker_that_is_not_there_yet(worker: Worker) -> None:
    comes = asyncio.Event()

    async def come() -> None:
        await comes.wait()
        await gather(worker)

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(join_by(worker, HOST, tasks.create_task(come())))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        comes.set()


async def test_a_name_is_looked_up_at_each_attempt_and_none_waits_longer_than_the_one_before(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC alone would look an unknown name up after 1, 1.6, 2.6, ... seconds, and a known one each 30 s."""
    monkeypatch.setattr("pdserve.executor.worker_node.RETRY_S", 0.02)
    led = iter([*["unknown"] * 20, *["127.0.0.9"] * 20])

    def resolve(name: str) -> frozenset[str]:
        assert name == f"w0.example:{worker.port}"
        if (host := next(led, HOST)) == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return frozenset({f"{host}:{worker.port}"})

    monkeypatch.setattr("pdserve.net.dns.resolve", resolve)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        await join_by(worker, "w0.example", tasks.create_task(gather(worker)))


async def test_a_machine_that_joined_and_opened_no_sockets_is_named(worker: Worker) -> None:
    async def join_alone() -> None:
        async with worker.dialled() as leader:
            call, _ = await leader.join(worker.greeting())
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(join_alone())
        with pytest.raises(ConfigError, match=r"nodes \[1\] have not joined within 2 s"):
            await gather(worker, 2.0)


def test_a_rank_of_a_machine_that_has_left_is_not_started_and_the_machine_is_named() -> None:
    node = Node(1, range(1, 2))
    node.end()
    with pytest.raises(DeviceError, match="node 1 has left"):
        Nodes(HOST, (node,)).start(1)


def test_a_rank_whose_machine_does_not_end_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.executor.joining.GIVEN_UP_S", 0.1)
    rank = RemoteRank(threading.Event())
    rank.kill()
    assert rank.wait(0.0) == 0


async def test_a_machine_that_is_silent_ends_the_sockets_that_the_first_rank_has_taken(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.executor.joining.SILENT_S", 2.0)
    is_cut = asyncio.Event()

    async def be_silent() -> None:
        async with worker.dialled() as leader:
            call, _ = await joined(worker, leader)
            await is_cut.wait()
            call.cancel()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(be_silent())
        async with worker.gathering() as nodes:
            assert nodes is not None
            rank, steps, orders = nodes.start(1)
            for each in (steps, orders):
                each.settimeout(10)
                assert await asyncio.to_thread(each.recv, 1) == b""
                each.close()
            assert await asyncio.to_thread(rank.wait, 10) == 0
            is_cut.set()
