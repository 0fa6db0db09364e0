"""The channel between a router's core and a frontend: its messages, their encoding, and how a stream carries them.

Messages posted in one turn of the event loop travel together, in order, as one frame: an array in MessagePack. Frames
are the messages of a gRPC stream, which the frontend opens at the router's internal port.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import grpc
import msgspec

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import RequestId
from pdserve.protocol.refusal import Refused, RefusedError, Status
from pdserve.protocol.sampling import PromptLogprobs
from pdserve.router.frontend.backend import Readiness
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.events import RequestArrived

SERVICE, METHOD = "pdserve.v1.FrontendService", "Attach"
ATTACH = f"/{SERVICE}/{METHOD}"
STREAM_ENDED = "its stream has ended"
SAID_GOODBYE = "it stops"
PROTOCOL_VERSION = 3  # of the messages; both ends need the same
MAX_UNREAD_BYTES = 48 * 1024 * 1024  # that may wait for a peer which does not read; a gRPC message may have 64 MiB
DRAINED_BYTES = 1024 * 1024  # that may wait when much more is to be sent

What = Literal["live", "request", "metrics", "engine"]


class Message(msgspec.Struct, array_like=True, gc=False):
    """A message is an array: its tag, then its fields in order."""


# ---- from the core


class ReadinessChanged(Message, tag=1):
    """What `Backend.readiness` returns from now on."""

    readiness: Readiness


class Tokens(Message, tag=2):
    """The command Deliver; `logprobs` are serialized protobuf messages."""

    request_id: RequestId
    index: int
    token_ids: list[int]
    logprobs: list[bytes]
    finish_reason: int
    prompt_logprobs: PromptLogprobs | None
    pooled: bytes = b""


class Ended(Message, tag=3):
    """A request's end: either `finished` or `refused` is set."""

    request_id: RequestId
    finished: Finished | None
    refused: Refused | None


class Reply(Message, tag=4):
    """The answer to the Begin or Ask of that number."""

    number: int
    data: bytes


class Returned(Message, tag=6):
    """A request that arrived while the router was shutting down: nothing was done with it."""

    request_id: RequestId


class Ping(Message, tag=7):
    """Answer with a Pong at once."""


# ---- from a frontend


class Attached(Message, tag=16):
    """The first message. The router's first one is ReadinessChanged."""

    frontend_id: str
    version: int
    metrics_address: str = ""  # host:port; empty: nowhere


class Arrive(Message, tag=17):
    """A request, perhaps one that another router had before. Clocks differ: its times are seconds before now."""

    event: RequestArrived  # without its token ids; its deadline is seconds after now
    token_ids: bytes  # as `token_ids.to_wire` packs them


class Leave(Message, tag=18):
    request_id: RequestId


class TooSlow(Message, tag=19):
    request_id: RequestId
    limit_bytes: int


class Stopped(Message, tag=20):
    """A continuation's text has reached a stop string."""

    request_id: RequestId
    index: int


class Counted(Message, tag=21):
    """The answer to Ended: what was sent to the client."""

    request_id: RequestId
    finish_reasons: list[int]  # of its continuations
    num_tokens: int  # of all continuations; fewer than the core counted if some came after a stop string
    refused: Refused | None  # set also if the core finished the request, but the client read too slowly


class Rejected(Message, tag=22):
    status: Status


class Begin(Message, tag=23):
    """Ask whether a tenant may begin a request; the reply is a Refused, or None."""

    number: int
    tenant: str
    limits: bytes  # TenantLimits as JSON


class Using(Message, tag=26):
    """A tenant has so many requests under way that another router admitted."""

    tenant: str
    num_requests: int


class Spend(Message, tag=24):
    tenant: str
    num_tokens: int


class Done(Message, tag=25):
    """A request that a Begin admitted has ended."""

    tenant: str


class Deny(Message, tag=27):
    reason: str


class Ask(Message, tag=28):
    """Ask for the live page's state, everything about one request, metrics as text, or an EngineState."""

    number: int
    what: What
    data: bytes


class Abort(Message, tag=29):
    """A client wants requests of its tenant ended. The core forwards this to all frontends."""

    tenant: str
    names: Sequence[str]


class Pong(Message, tag=31):
    """The answer to Ping, with counts so far: spans by result, and connections as `Connections` has them."""

    num_spans: dict[str, int]
    num_opened: int
    num_called: int


class Goodbye(Message, tag=32):
    """The last message: the frontend stops. A killed process's stream ends without it."""


FromCore = ReadinessChanged | Tokens | Ended | Reply | Abort | Returned | Ping
OfFrontend = (
    Arrive | Leave | TooSlow | Stopped | Counted | Rejected | Begin | Using | Spend | Done | Deny | Ask | Abort | Pong
)
FromFrontend = Attached | OfFrontend | Goodbye

_encoder = msgspec.msgpack.Encoder()
core_decoder = msgspec.msgpack.Decoder(list[FromCore])
frontend_decoder = msgspec.msgpack.Decoder(list[FromFrontend])
Read = Callable[[], Awaitable[object]]  # the stream's next frame; anything but bytes is its end
Write = Callable[[bytes], Awaitable[None]]


def frame(messages: Sequence[Message]) -> bytes:
    return _encoder.encode(messages)


class Channel:
    def __init__(self, decoder: "msgspec.msgpack.Decoder[Any]", take: Callable[[Any], None]) -> None:
        """`take` gets each message of the peer. What it raises ends the channel."""
        self._decoder = decoder
        self._take = take
        self._posted: list[Message] = []
        self._frames: deque[bytes] = deque()  # to be written
        self._num_bytes = 0  # of these
        self._has_frames, self._is_drained = asyncio.Event(), asyncio.Event()
        self._is_drained.set()
        self._finished = ""  # why it is to end once all is written
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why

    def post(self, message: Message) -> None:
        """Send a message at the end of this turn of the event loop. After the channel's end it is dropped."""
        if self._closed.done():
            return
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._flush)
        self._posted.append(message)

    async def drain(self) -> None:
        """Return once no more than DRAINED_BYTES wait to be written, or the channel has ended."""
        await asyncio.sleep(0)  # what was posted in this turn counts
        await self._is_drained.wait()

    async def closed(self) -> str:
        """Return why the channel ended, once it has."""
        return await asyncio.shield(self._closed)

    def close(self, why: str) -> None:
        """End the channel at once."""
        if not self._closed.done():
            self._closed.set_result(why)
            self._is_drained.set()

    def finish(self, why: str) -> None:
        """End the channel once what was posted is written. Whoever calls bounds the time that the peer may take."""
        self._flush()
        self._finished = why
        if not self._num_bytes:
            self.close(why)

    async def run(self, read: Read, write: Write) -> str:
        """Carry messages until the channel is closed, or the stream ends; return why it ended."""
        ends = [asyncio.ensure_future(self._read(read)), asyncio.ensure_future(self._write(write))]
        try:
            await asyncio.shield(self._closed)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)
        for end in ends:
            if not end.cancelled() and (error := end.exception()) is not None:
                raise error
        return self._closed.result()

    async def _read(self, read: Read) -> None:
        try:
            while isinstance(packed := await read(), bytes):
                for message in self._decoder.decode(packed):
                    self._take(message)
            self.close(STREAM_ENDED)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self.close(_reason(error))
        except (ProtocolError, RefusedError, ValueError) as error:  # ValueError: msgspec's and pydantic's
            self.close(f"{type(error).__name__}: {error}")
        except Exception as error:
            self.close(f"{type(error).__name__}: {error}")
            raise

    async def _write(self, write: Write) -> None:
        try:
            while True:
                await self._has_frames.wait()
                packed = self._frames.popleft()
                if not self._frames:
                    self._has_frames.clear()
                await write(packed)
                self._num_bytes -= len(packed)
                if self._num_bytes <= DRAINED_BYTES:
                    self._is_drained.set()
                if self._finished and not self._num_bytes:
                    self.close(self._finished)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            self.close(_reason(error))

    def _flush(self) -> None:
        posted, self._posted = self._posted, []
        if self._closed.done() or not posted:
            return
        packed = frame(posted)
        if self._num_bytes > MAX_UNREAD_BYTES - len(packed):
            self.close(f"it does not read: over {MAX_UNREAD_BYTES} bytes wait")
            return
        self._frames.append(packed)
        self._num_bytes += len(packed)
        self._has_frames.set()
        if self._num_bytes > DRAINED_BYTES:
            self._is_drained.clear()


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return type(error).__name__
