"""The workers' endpoint: LinkService. One task reads a worker's stream, another writes to it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TypeAlias

import grpc

from pdserve.errors import ProtocolError
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.link_pb2_grpc import LinkServiceServicer
from pdserve.router import wire
from pdserve.router.shell import Shell, WorkerStream
from pdserve.rpc import DISMISSED_STATUS, abort

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 10.0
MAX_PAIRS = 4096  # shown of one worker
STREAM_ENDED = "its stream ended"

Follow = Callable[[WorkerStream], Coroutine[object, object, None]]
AttachContext: TypeAlias = "grpc.aio.ServicerContext[link.AttachRequest, link.AttachResponse]"


class Links(LinkServiceServicer):
    """Lets workers attach."""

    def __init__(self, shell: Shell, welcome: link.Welcome, follow: Follow | None = None) -> None:
        """`follow` starts to follow the KV events that a worker publishes."""
        self._shell = shell
        self._welcome = welcome
        self._follow = follow

    async def Attach(  # type: ignore[override]  # replies are written to the context  # noqa: N802
        self, request_iterator: AsyncIterator[link.AttachRequest], context: AttachContext
    ) -> None:
        task = asyncio.current_task()
        stream = self._shell.open_stream(task)
        try:
            await self._attend(stream, request_iterator, context)
        except asyncio.CancelledError:
            if task is None or stream.closed is None or task.uncancel():
                raise  # the worker has gone, or the server stops
        finally:
            self._shell.close_stream(stream)
        if stream.closed != STREAM_ENDED:
            code = DISMISSED_STATUS if stream.is_dismissed else grpc.StatusCode.FAILED_PRECONDITION
            await abort(context, code, stream.closed or "")

    async def _attend(
        self, stream: WorkerStream, messages: AsyncIterator[link.AttachRequest], context: AttachContext
    ) -> None:
        """Read and write until either side closes the stream, which cancels both."""
        # On its own: a first write that is interrupted leaves gRPC unsure whether this has been sent.
        await context.send_initial_metadata(())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(stream, messages, tasks), name=f"link {stream.link_id} reader")
            await context.write(link.AttachResponse(welcome=self._welcome))
            while True:
                await context.write(await stream.outbound.get())

    async def _read(
        self, stream: WorkerStream, messages: AsyncIterator[link.AttachRequest], tasks: asyncio.TaskGroup
    ) -> None:
        follows = False
        try:
            await self._read_registration(stream, messages)
            async for message in messages:
                self._take(stream, message)
                if self._follow is not None and stream.registration.kv_events_endpoint and not follows:
                    follows = True
                    tasks.create_task(self._follow(stream), name=f"link {stream.link_id} KV events")
        except (ProtocolError, TimeoutError) as error:
            logger.warning("worker %r is dropped: %s", stream.registration.worker_id, error)
            if isinstance(error, ProtocolError):
                self._shell.refused[error.refusal] += 1
            stream.close(str(error) or "no registration came in time")
        stream.close(STREAM_ENDED)

    async def _read_registration(self, stream: WorkerStream, messages: AsyncIterator[link.AttachRequest]) -> None:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            async for message in messages:
                if message.WhichOneof("message") != "register":
                    raise ProtocolError(f"message: {message.WhichOneof('message')} before register")
                self._take(stream, message)
                return

    def _take(self, stream: WorkerStream, message: link.AttachRequest) -> None:
        events = wire.worker_events(stream.link_id, message)
        match message.WhichOneof("message"):
            case "register":
                stream.registration = message.register
                level = logging.INFO if message.register.ready or not message.register.load_progress else logging.DEBUG
                logger.log(level, "worker %s: %s", message.register.worker_id, _summary(message.register))
            case "heartbeat":
                stream.load = message.heartbeat
            case "pair" if len(stream.pairs) < MAX_PAIRS:
                stream.pairs[message.pair.decode_worker_id] = message.pair
            case _:
                pass  # the core's alone
        for event in events:
            self._shell.post(event)


def _summary(register: link.Register) -> str:
    role = link.Role.Name(register.role).removeprefix("ROLE_").lower()
    state = "ready" if register.ready else f"loading, {register.load_progress:.0%}"
    return f"{role}, incarnation {register.incarnation:016x}, {state}"
