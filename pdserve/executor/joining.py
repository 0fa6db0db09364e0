"""Takes further machines (nodes) into a worker whose ranks are on several: rank 0 gets two sockets to each rank there.

Invariant: a machine belongs to the worker from the answer to its greeting until its call ends. Once all have joined,
none is replaced: the end of one is the end of the worker.

The call is gRPC's, with the cluster's certificates and secret. Both ends beat: a machine from which nothing comes for
15 s, frozen or cut off, counts as one whose call has ended.
"""

import asyncio
import logging
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias, TypeVar

import grpc

from pdserve import __version__
from pdserve.base.errors import ConfigError, DeviceError, PeerFault, echo
from pdserve.base.ids import Peer
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.executor.device_names import devices_here
from pdserve.executor.node_links import BEAT_S, SILENT_S, SOCKETS, carry, check_interface
from pdserve.net.credentials import Credentials
from pdserve.net.rpc import abort, is_loopback, running
from pdserve.proto.v1 import nodes_pb2 as wire
from pdserve.proto.v1.nodes_pb2_grpc import NodeServiceServicer, add_NodeServiceServicer_to_server
from pdserve.settings.config import WorkerConfig
from pdserve.settings.degrees import Degrees

logger = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 5.0
GIVEN_UP_S = 10.0  # for a machine to end its ranks

_Request = TypeVar("_Request")
JoinContext: TypeAlias = "grpc.aio.ServicerContext[wire.JoinRequest, wire.JoinResponse]"
CarryContext: TypeAlias = "grpc.aio.ServicerContext[wire.CarryRequest, wire.CarryResponse]"


class RemoteRank:
    """A rank's process on another machine, as far as rank 0 has to do with it; see `subprocess.Popen`."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        """Wait until its machine has ended all of its ranks, or is lost."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a rank of another machine", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Let its machine end it, now that its sockets are closed; give it up where that takes long."""
        self._ended.wait(GIVEN_UP_S)
        self._ended.set()


class Node:
    """A machine that has joined. Its calls' thread ends it, rank 0's thread takes its sockets."""

    def __init__(self, number: int, ranks: range) -> None:
        self.number, self.ranks = number, ranks
        self.ticket = secrets.token_bytes(16)
        self.ended = threading.Event()
        self.sockets: dict[tuple[int, int], socket.socket] = {}  # rank 0's ends, by rank and kind, until it takes them
        self.relayed: list[socket.socket] = []  # their other ends, which the calls own
        self._taking = threading.Lock()

    @property
    def is_linked(self) -> bool:
        return len(self.sockets) == len(self.ranks) * len(SOCKETS)

    def take(self, rank: int) -> tuple[socket.socket, socket.socket]:
        """Return rank 0's ends of a rank's sockets. DeviceError if the machine has left."""
        with self._taking:
            if self.ended.is_set():
                raise DeviceError(f"node {self.number} has left")
            steps, orders = (self.sockets.pop((rank, kind)) for kind in SOCKETS)
        return steps, orders

    def end(self) -> None:
        with self._taking:
            self.ended.set()
            for each in self.sockets.values():
                each.close()

    def cut(self) -> None:
        """End the sockets that rank 0 has taken: the calls of a machine that is silent do not end by themselves."""
        for each in self.relayed:
            with suppress(OSError):  # it is closed already
                each.shutdown(socket.SHUT_RDWR)


class Nodes:
    """All further machines of a worker, once they have joined. Rank 0 calls this from its own thread."""

    def __init__(self, host: str, nodes: tuple[Node, ...]) -> None:
        """host: this machine's address in the network of pages and sums."""
        self.host = host
        self._nodes = {rank: node for node in nodes for rank in node.ranks}

    def __contains__(self, rank: int) -> bool:
        return rank in self._nodes

    def told(self, config: WorkerConfig, dtype: str) -> WorkerConfig:
        """Return the settings of all ranks: what they would choose by their machine is as rank 0 has chosen."""
        here = config.degrees.ranks_per_node
        num_threads = config.num_threads or here * max(1, len(os.sched_getaffinity(0)) // here)
        return config.model_copy(update={"dtype": dtype, "num_threads": num_threads})

    def start(self, rank: int) -> tuple[RemoteRank, socket.socket, socket.socket]:
        """Return a rank, which begins with the first message, its socket for steps, and the one that drives its mover.

        The machine itself takes that message, and adds what is its own. DeviceError if it has left.
        """
        node = self._nodes[rank]
        steps, orders = node.take(rank)
        return RemoteRank(node.ended), steps, orders


class NodeServicer(NodeServiceServicer):
    """Answers machines that want to join."""

    def __init__(
        self, degrees: Degrees, accepted: wire.NodeAccepted, host: str, on_leaving: Callable[[], None]
    ) -> None:
        """accepted: what all of them are told. on_leaving: called where one was asked to end."""
        self.complete = asyncio.Event()
        self.last_refusal = ""
        self._degrees, self._accepted, self._host, self._on_leaving = degrees, accepted, host, on_leaving
        self._nodes: dict[int, Node] = {}

    @property
    def nodes(self) -> Nodes:
        return Nodes(self._host, tuple(self._nodes.values()))

    @property
    def missing(self) -> list[int]:
        """Return which machines have not joined."""
        return [rank for rank in range(1, self._degrees.nodes) if rank not in self._nodes]

    @property
    def unlinked(self) -> list[int]:
        """Return which machines have not joined, or have not opened all sockets of their ranks."""
        return sorted({*self.missing, *(number for number, node in self._nodes.items() if not node.is_linked)})

    def refusal_of(self, greeting: wire.NodeGreeting) -> str:
        """Return why a machine may not join, empty if it may."""
        number, per_node = greeting.node_rank, self._degrees.ranks_per_node
        if greeting.version != __version__:
            return f"version: {echo(greeting.version, repr)} of pdserve, and the worker's own is {__version__}"
        if not 0 < number < self._degrees.nodes:
            return f"node_rank: {number}, and the worker has nodes 0 to {self._degrees.nodes - 1} (nnodes)"
        if number not in self.missing:
            return f"node_rank: {number} has joined already"
        if greeting.model != self._accepted.model:
            return f"model: its files differ from the worker's: {echo(greeting.model)}, not {self._accepted.model}"
        if self._accepted.device not in greeting.devices:
            has = echo(", ".join(greeting.devices))
            return f"device: {has}, and the worker's {self._accepted.device} may round otherwise"
        if is_loopback(greeting.handoff_host) != is_loopback(self._host):
            return f"handoff_host: {echo(greeting.handoff_host)} and the worker's {self._host} do not reach each other"
        if greeting.num_processors < per_node:
            return (
                f"tensor_parallel_size: {per_node} ranks a node need as many processors, not {greeting.num_processors}"
            )
        return ""

    async def Join(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request_iterator: AsyncIterator[wire.JoinRequest], context: JoinContext
    ) -> None:
        greeting = (await _first(request_iterator)).greeting
        if refusal := self.refusal_of(greeting):
            self.last_refusal = f"node {greeting.node_rank} is refused: {refusal}"
            logger.warning("%s", self.last_refusal)
            await context.write(wire.JoinResponse(refused=refusal))
            return
        first = greeting.node_rank * self._degrees.ranks_per_node
        node = Node(greeting.node_rank, range(first, first + self._degrees.ranks_per_node))
        self._nodes[greeting.node_rank] = node
        try:
            accepted = wire.NodeAccepted(ticket=node.ticket, ranks=node.ranks)
            accepted.MergeFrom(self._accepted)
            await context.write(wire.JoinResponse(accepted=accepted))
            logger.info("node %d has joined, with ranks %s", greeting.node_rank, list(node.ranks))
            await self._hear(request_iterator, context)
        except TimeoutError:
            logger.warning("node %d is silent for %g s", greeting.node_rank, SILENT_S)
            node.cut()
        finally:
            node.end()
            if not self.complete.is_set():
                logger.warning("node %d has left before all have joined", greeting.node_rank)
                del self._nodes[greeting.node_rank]

    async def _hear(self, requests: AsyncIterator[wire.JoinRequest], context: JoinContext) -> None:
        """Beat until a machine ends its call; TimeoutError where it is silent."""
        beating = asyncio.create_task(_beat(context))
        try:
            while True:
                async with asyncio.timeout(SILENT_S):
                    request = await anext(requests)
                if request.HasField("leaving"):
                    self._on_leaving()
        except StopAsyncIteration:
            pass
        finally:
            beating.cancel()

    async def Carry(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request_iterator: AsyncIterator[wire.CarryRequest], context: CarryContext
    ) -> None:
        opening = (await _first(request_iterator)).opening
        node = next(
            (each for each in self._nodes.values() if secrets.compare_digest(each.ticket, opening.ticket)), None
        )
        name = opening.rank, int(opening.socket)
        is_known = node is not None and opening.rank in node.ranks and opening.socket in SOCKETS
        if node is None or not is_known or name in node.sockets or self.complete.is_set():
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, "ticket: it opens no such socket of a rank now")
        own, theirs = socket.socketpair()
        node.sockets[name] = own
        node.relayed.append(theirs)
        if not self.unlinked:
            self.complete.set()
        contents = (request.content async for request in request_iterator)
        await carry(theirs, contents, lambda content: context.write(wire.CarryResponse(content=content)))


async def _beat(context: JoinContext) -> None:
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):  # the call has ended
        while True:
            await context.write(wire.JoinResponse(beat=wire.NodeBeat()))
            await asyncio.sleep(BEAT_S)


async def _first(requests: AsyncIterator[_Request]) -> _Request:
    async with asyncio.timeout(GREETING_TIMEOUT_S):
        return await anext(requests)


@asynccontextmanager
async def gathering(
    config: WorkerConfig, me: Peer, checkpoint: Checkpoint, credentials: Credentials, on_leaving: Callable[[], None]
) -> AsyncIterator[Nodes | None]:
    """Wait until all machines of a worker have joined, which stay for the length of the block; None: it has but one.

    on_leaving: called where one of them was asked to end. ConfigError where not all join in time.
    """
    if config.nnodes == 1:
        yield None
        return
    check_interface(config.handoff_host, has_identity=credentials.identity is not None)
    devices = await asyncio.to_thread(devices_here)
    accepted = wire.NodeAccepted(
        worker_id=me.worker_id,
        incarnation=me.incarnation,
        version=__version__,
        model=await asyncio.to_thread(lambda: checkpoint.fingerprint),
        device=devices[-1 if config.device == "cuda" else 0],
    )
    servicer = NodeServicer(config.degrees, accepted, config.handoff_host, on_leaving)
    server = credentials.server(_log_denied)
    add_NodeServiceServicer_to_server(servicer, server)
    address = credentials.listen(server, config.handoff_host, config.master_port, "master_port")
    async with running(server):
        logger.info("%d other nodes join at %s", config.nnodes - 1, address)
        try:
            async with asyncio.timeout(config.join_timeout_s):
                await servicer.complete.wait()
        except TimeoutError:
            text = f"join_timeout_s: nodes {servicer.unlinked} have not joined within {config.join_timeout_s:g} s"
            raise ConfigError(f"{text}; {servicer.last_refusal}" if servicer.last_refusal else text) from None
        yield servicer.nodes


def _log_denied(fault: PeerFault) -> None:
    logger.warning("a node is denied: %s", fault.value)
