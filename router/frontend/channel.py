"""The private channel between a router's core and a frontend's process: its messages and their encoding.

Messages posted in one turn of the event loop travel together, in order, as one frame: the length in four bytes,
little-endian, then an array in MessagePack.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec

from pdserve.errors import ProtocolError, Status
from pdserve.ids import RequestId
from pdserve.router.commands import Finished, Refused
from pdserve.router.events import RequestArrived
from pdserve.router.frontend.backend import Readiness
from pdserve.sampling import PromptLogprobs

MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_UNREAD_BYTES = 64 * 1024 * 1024  # that may wait for a peer which does not read
_LENGTH_BYTES = 4

What = Literal["live", "request", "metrics", "engine"]


class _Message(msgspec.Struct, array_like=True, gc=False):
    """A message is an array: its tag, then its fields in order."""


# ---- from the core


class ReadinessChanged(_Message, tag=1):
    """What `Backend.readiness` returns from now on."""

    readiness: Readiness


class Tokens(_Message, tag=2):
    """The command Deliver; `logprobs` are serialized protobuf messages."""

    request_id: RequestId
    index: int
    token_ids: list[int]
    logprobs: list[bytes]
    finish_reason: int
    prompt_logprobs: PromptLogprobs | None


class Ended(_Message, tag=3):
    """A request's end: either `finished` or `refused` is set."""

    request_id: RequestId
    finished: Finished | None
    refused: Refused | None


class Reply(_Message, tag=4):
    """The answer to the Begin or Ask of that number."""

    number: int
    data: bytes


class Stop(_Message, tag=6):
    """Close the endpoints, then end the process."""


class Ping(_Message, tag=7):
    """Answer with a Pong at once."""


# ---- from a frontend


class Ready(_Message, tag=16):
    """The endpoints are open."""


class Arrive(_Message, tag=17):
    event: RequestArrived  # without its token ids
    token_ids: bytes  # packed, in this machine's byte order


class Leave(_Message, tag=18):
    request_id: RequestId


class TooSlow(_Message, tag=19):
    request_id: RequestId
    limit_bytes: int


class Stopped(_Message, tag=20):
    """A continuation's text has reached a stop string."""

    request_id: RequestId
    index: int


class Counted(_Message, tag=21):
    """The answer to Ended: what was sent to the client."""

    request_id: RequestId
    finish_reasons: list[int]  # of its continuations
    num_tokens: int  # of all continuations; fewer than the core counted if some came after a stop string
    refused: Refused | None  # set also if the core finished the request, but the client read too slowly


class Rejected(_Message, tag=22):
    status: Status


class Begin(_Message, tag=23):
    """Ask whether a tenant may begin a request; the reply is a Refused, or None."""

    number: int
    tenant: str
    limits: bytes  # TenantLimits as JSON


class Spend(_Message, tag=24):
    tenant: str
    num_tokens: int


class Done(_Message, tag=25):
    """A request that a Begin admitted has ended."""

    tenant: str


class Deny(_Message, tag=27):
    reason: str


class Ask(_Message, tag=28):
    """Ask for the live page's state, everything about one request, metrics as text, or an EngineState."""

    number: int
    what: What
    data: bytes


class Abort(_Message, tag=29):
    """A client wants requests of its tenant ended. The core forwards this to all frontends."""

    tenant: str
    names: Sequence[str]


class Pong(_Message, tag=31):
    """The answer to Ping, with counts so far: spans by result, and connections as `Connections` has them."""

    num_spans: dict[str, int]
    num_opened: int
    num_called: int


FromCore = ReadinessChanged | Tokens | Ended | Reply | Abort | Stop | Ping
FromFrontend = (
    Ready | Arrive | Leave | TooSlow | Stopped | Counted | Rejected | Begin | Spend | Done | Deny | Ask | Abort | Pong
)

_encoder = msgspec.msgpack.Encoder()
core_decoder = msgspec.msgpack.Decoder(list[FromCore])
frontend_decoder = msgspec.msgpack.Decoder(list[FromFrontend])


def frame(messages: Sequence[_Message]) -> bytes:
    """Return messages as one frame."""
    packed = _encoder.encode(messages)
    return len(packed).to_bytes(_LENGTH_BYTES, "little") + packed


class Channel(asyncio.Protocol):
    """One end of the channel."""

    def __init__(
        self, decoder: "msgspec.msgpack.Decoder[Any]", take: Callable[[Any], None], lost: Callable[[str], None]
    ) -> None:
        """`take` gets each message of the peer. `lost` is called last, with the reason why the channel ended."""
        self._decoder = decoder
        self._take = take
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._posted: list[_Message] = []
        self._received = bytearray()
        self._why = "it has closed the channel"

    def post(self, message: _Message) -> None:
        """Send a message at the end of this turn of the event loop. After the channel's end it is dropped."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._flush)
        self._posted.append(message)

    def close(self, why: str) -> None:
        """End the channel at once."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(self._why)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, end = 0, _LENGTH_BYTES
        try:
            while len(received) >= end:
                num_bytes = int.from_bytes(received[start:end], "little")
                if num_bytes > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame has {num_bytes} bytes, over the limit of {MAX_FRAME_BYTES}")
                if len(received) < end + num_bytes:
                    break
                for message in self._decoder.decode(received[end : end + num_bytes]):
                    self._take(message)
                start = end + num_bytes
                end = start + _LENGTH_BYTES
        except Exception as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        del received[:start]

    def _flush(self) -> None:
        posted, self._posted = self._posted, []
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame(posted))
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.close(f"it does not read: over {MAX_UNREAD_BYTES} bytes wait")
