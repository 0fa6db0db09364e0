"""The process of a further machine (node) of a worker: it joins the worker, and runs the ranks that are there.

Invariant: the ranks end before this process does, which ends when one of them does, when the worker's own process does,
or when neither that process nor its machine is heard any more. It runs the ranks of one process of the worker, once.
"""

import asyncio
import logging
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import grpc
import msgspec

from pdserve import __version__
from pdserve.base.errors import CommandError, ConfigError, DeviceError, first_of
from pdserve.base.files import name_process
from pdserve.base.ids import Incarnation
from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.base.signals import CLOSING_S, drain_on_signals
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.executor.device_names import devices_here
from pdserve.executor.node_links import BEAT_S, SILENT_S, SOCKETS, carry, check_interface
from pdserve.executor.rank_frames import Setup
from pdserve.executor.rank_process import start_rank
from pdserve.net.certificates import Part
from pdserve.net.credentials import Credentials
from pdserve.net.dns import addresses_of, check_names
from pdserve.net.frames import packed, whole_frame
from pdserve.net.health import answering
from pdserve.net.rpc import identify, join_address
from pdserve.observe.metrics_server import showing
from pdserve.proto.v1 import nodes_pb2 as wire
from pdserve.proto.v1.nodes_pb2_grpc import NodeServiceStub
from pdserve.settings.config import WorkerConfig
from pdserve.settings.worker_node import WorkerNodeConfig

logger = logging.getLogger(__name__)

JOIN, CARRY = "/pdserve.v1.NodeService/Join", "/pdserve.v1.NodeService/Carry"
END_S = 5.0  # for a rank whose sockets are closed
RETRY_S = 1.0  # between two attempts to reach the worker's own process
ANSWER_S = 5.0  # for that process to answer
ABSENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
REMEDIES = {grpc.StatusCode.UNAUTHENTICATED: "secret_file", grpc.StatusCode.PERMISSION_DENIED: "identity_dir"}

JoinCall: TypeAlias = "grpc.aio.StreamStreamCall[wire.JoinRequest, wire.JoinResponse]"


async def serve(config: WorkerNodeConfig) -> int:
    """Run the ranks of this machine until the worker ends; return the exit status."""
    check_interface(config.handoff_host, has_identity=config.identity_dir is not None)
    address = join_address(config.master_addr, config.master_port)
    check_names((address,), "master_addr")
    credentials = Credentials.read(config.secret_file, config.identity_dir, Part.WORKER)
    checkpoint = open_checkpoint(resolve_model(config.model))
    greeting = wire.NodeGreeting(
        version=__version__,
        node_rank=config.node_rank,
        model=await asyncio.to_thread(lambda: checkpoint.fingerprint),
        handoff_host=config.handoff_host,
        num_processors=len(os.sched_getaffinity(0)),
        devices=await asyncio.to_thread(devices_here),
    )
    async with (
        answering(config) as health,
        showing(config, lambda: (), credentials.identity),
        reached(credentials, address, config.join_timeout_s) as leader,
    ):
        call, accepted = await leader.join(greeting)
        logger.info("joined %s at %s, with ranks %s", accepted.worker_id, address, list(accepted.ranks))
        health.start(lambda: True)
        node = RunningNode(config, checkpoint.path, leader, accepted)
        limit_s = config.drain_timeout_s + CLOSING_S
        with drain_on_signals(asyncio.get_running_loop(), node.leaving.set, limit_s):
            return await node.run(call)


class RunningNode:
    """The ranks of this machine."""

    def __init__(self, config: WorkerNodeConfig, model: Path, leader: "Leader", accepted: wire.NodeAccepted) -> None:
        """model: where the files of the worker's model are here."""
        self.leaving = asyncio.Event()  # this machine was asked to end
        self._config, self._model, self._leader, self._accepted = config, model, leader, accepted
        self._processes: list[subprocess.Popen[bytes]] = []

    async def run(self, call: JoinCall) -> int:
        """Run all ranks until the worker ends them; return the exit status."""
        status = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(each) for each in (_until_lost(call), self._beat(call))]
                ranks = [tasks.create_task(self._run(rank)) for rank in self._accepted.ranks]
                await asyncio.wait(ranks)
                for each in beside:
                    each.cancel()
        except ExceptionGroup as group:
            status, cause = DEVICE_EXIT_STATUS, first_of(group, Exception)
            assert cause is not None, "each group holds an error"
            why = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else cause
            logger.critical("the device is broken: %s: this process ends", why, exc_info=_unknown(cause))
        finally:
            await asyncio.to_thread(self._end)
        return status

    async def _run(self, rank: int) -> None:
        """Run a rank until its sockets are closed. DeviceError where it fails."""
        steps, orders = [await self._leader.open(self._accepted.ticket, rank, kind) for kind in SOCKETS]
        setup = msgspec.msgpack.decode(await steps.first_message(), type=Setup)
        # Now all have joined, and none is replaced: another process here is none of the worker's.
        name_process(self._config.termination_message_file, Incarnation(self._accepted.incarnation))
        driven, theirs = socket.socketpair()
        with theirs:
            process, connected = start_rank(theirs.fileno())
            self._processes.append(process)
            connected.sendall(packed(self._as_here(setup, theirs.fileno())))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(steps.carry(connected))
            tasks.create_task(orders.carry(driven))
        try:
            status = await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"rank {rank} is stopped, or hangs") from None
        if status:
            raise DeviceError(f"rank {rank} has ended with status {status}")

    def _as_here(self, setup: Setup, mover: int) -> Setup:
        """Return how a rank loads its part on this machine. mover: the descriptor of its socket for orders."""
        own = {name: getattr(self._config, name) for name in ("handoff_host", "handoff_rdma_devices")}
        settings = WorkerConfig.model_validate_json(setup.settings)
        setup.settings = settings.model_copy(update={**own, "shared_weights_dir": None}).model_dump_json(
            exclude_unset=True
        )
        setup.model, setup.mover, setup.host = str(self._model), mover, self._config.handoff_host
        return setup

    async def _beat(self, call: JoinCall) -> None:
        """Tell the worker that this machine goes on, and once that it was asked to end."""
        while not self.leaving.is_set():
            await call.write(wire.JoinRequest(beat=wire.NodeBeat()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self.leaving.wait(), BEAT_S)
        await call.write(wire.JoinRequest(leaving=wire.NodeLeaving()))
        while True:
            await asyncio.sleep(BEAT_S)
            await call.write(wire.JoinRequest(beat=wire.NodeBeat()))

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


async def _until_lost(call: JoinCall) -> None:
    """Raise DeviceError once the worker's own process has ended, or is silent."""
    try:
        while True:
            async with asyncio.timeout(SILENT_S):
                if await call.read() is grpc.aio.EOF:
                    raise DeviceError("the worker's own process has ended")
    except TimeoutError:
        raise DeviceError(f"the worker's own process is silent for {SILENT_S:g} s") from None


def _unknown(cause: BaseException) -> BaseException | None:
    """Return what is to be logged with its traceback."""
    return None if isinstance(cause, DeviceError | grpc.aio.AioRpcError) else cause


class Leader:
    """The worker's own process."""

    def __init__(self, channel: grpc.aio.Channel, secret: bytes, address: str) -> None:
        self._channel, self._secret, self._address = channel, secret, address
        self._stub = NodeServiceStub(channel)

    async def join(self, greeting: wire.NodeGreeting) -> tuple[JoinCall, wire.NodeAccepted]:
        """Become one of the worker's machines; ConfigError says why it is refused."""
        try:
            async with asyncio.timeout(ANSWER_S):
                call = self._stub.Join(metadata=await identify(self._channel, self._secret, JOIN))
                await call.write(wire.JoinRequest(greeting=greeting))
                answer = await call.read()
        except TimeoutError:
            raise CommandError(f"{self._address}: it does not answer within {ANSWER_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _explained(error, self._address) from error
        assert isinstance(answer, wire.JoinResponse), "the call has not ended, and no error is raised"
        if answer.refused:
            raise ConfigError(answer.refused)
        accepted = answer.accepted
        for name, there, here in (
            ("version", accepted.version, __version__),
            ("model", accepted.model, greeting.model),
        ):
            if there != here:
                raise ConfigError(f"{name}: {there} at {self._address}, and {here} here")
        return call, accepted

    async def open(self, ticket: bytes, rank: int, kind: wire.RankSocket.ValueType) -> "Carried":
        """Open the way of one socket to the first rank."""
        call = self._stub.Carry(metadata=await identify(self._channel, self._secret, CARRY))
        await call.write(wire.CarryRequest(opening=wire.CarryOpening(ticket=ticket, rank=rank, socket=kind)))
        return Carried(call)


@asynccontextmanager
async def reached(credentials: Credentials, address: str, within_s: float) -> AsyncIterator[Leader]:
    """Dial the worker's own process until it answers; it stays dialled for the length of the block.

    ConfigError where it refuses this process, CommandError where it does not answer in time.
    """
    why = ""
    async with AsyncExitStack() as dialled:
        try:
            async with asyncio.timeout(within_s):
                while isinstance(found := await _dial(credentials, address, dialled), str):
                    if found != why:
                        logger.warning("the worker is not reached yet: %s: %s", address, found)
                    why = found
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            raise CommandError(f"join_timeout_s: {address} is not reached within {within_s:g} s: {why}") from None
        yield Leader(found, credentials.secret, address)


async def _dial(credentials: Credentials, address: str, dialled: AsyncExitStack) -> grpc.aio.Channel | str:
    """Return a channel to a process that answers, which `dialled` closes; or why there is none yet.

    Looks the name up each time, and dials anew: gRPC itself looks an unknown name up ever less often, at last once in
    two minutes, and one that it knows at most twice a minute.
    """
    try:
        found = (await addresses_of((address,)))[0]
        channel = await dialled.enter_async_context(credentials.channel(found, Part.WORKER))
        await identify(channel, credentials.secret, JOIN, ANSWER_S)
        return channel
    except OSError as error:
        why = str(error.strerror or error)
    except grpc.aio.AioRpcError as error:
        if error.code() not in ABSENT:
            raise _explained(error, address) from error
        why = str(error.details())
    await dialled.aclose()
    return why


def _explained(error: grpc.aio.AioRpcError, address: str) -> ConfigError | CommandError:
    if error.code() in REMEDIES:
        return ConfigError(f"{REMEDIES[error.code()]}: {address} refuses it: {error.details()}")
    return CommandError(f"{address}: {error.details()}")


class Carried:
    """The way of one socket to the first rank."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[wire.CarryRequest, wire.CarryResponse]") -> None:
        self._call = call
        self._contents = self._read()

    async def first_message(self) -> bytes:
        """Return the first message, still packed; nothing follows before it is answered."""
        received = bytearray()
        async for content in self._contents:
            received += content
            if (message := whole_frame(received)) is not None:
                return message
        raise DeviceError("the worker's own process has ended")

    async def carry(self, connected: socket.socket) -> None:
        """Carry what else comes, and what the rank says, until the first rank's end closes."""
        await carry(connected, self._contents, self._send, self._call.done_writing)

    async def _send(self, content: bytes) -> None:
        await self._call.write(wire.CarryRequest(content=content))

    async def _read(self) -> AsyncIterator[bytes]:
        async for response in self._call:
            yield response.content
