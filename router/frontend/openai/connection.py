"""A client's HTTP/1.1 connection: uvicorn's, with bounds on what a client may hold, and for how long.

A connection ends if a head or body does not come in time, a head is too large, the client does not read, or the client
is gone without having closed.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Iterable
from typing import Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.net.rpc import MAX_CONNECTIONS
from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.frontend.openai.errors import Header, body_of, headers_for

MAX_REFUSED = 512  # connections beyond MAX_CONNECTIONS that get an answer
MAX_HEAD_BYTES = 65_536
HEAD_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0
LOOK_S = 15.0  # between two checks of the peer
IDLE_TIMEOUT_S = 75  # between requests
STALLED_S = 300.0  # within which a peer must read some of the bytes that wait
GONE_S = 30.0  # of silence, if a peer answers neither data nor keepalive probes
MAX_UNANSWERED = 2  # retransmissions or probes: the first may be on its way
TCP_INFO = getattr(socket, "TCP_INFO", None)
# struct tcp_info: retransmits, probes, last_ack_recv in ms, bytes_acked, notsent_bytes
INFO = struct.Struct("=2xBB52xI60xQ16xI")


class Peer:
    """Whether the other end of a connection still reads, by what TCP knows.

    The bytes that wait in this process say little: kernels hold megabytes, and a receiver whose window was full opens
    it again only after tens of kilobytes were read, which takes minutes at a few hundred bytes a second. Only Linux
    shows TCP's figures; elsewhere every peer counts as reading.
    """

    def __init__(self, tcp: socket.socket | None, now_s: float) -> None:
        self._tcp = tcp if TCP_INFO is not None else None
        self._num_taken = 0
        self._taken_s = now_s
        self.has_all = True  # at the last check the kernel had nothing left to send
        self.is_done = False  # the same at the last two checks, and the peer took nothing between them

    def reads(self, now_s: float) -> bool:
        """Check the peer. False if it is gone, or has read nothing for STALLED_S while bytes waited."""
        if self._tcp is None or TCP_INFO is None:
            return True
        try:
            info = self._tcp.getsockopt(socket.IPPROTO_TCP, TCP_INFO, INFO.size)
        except OSError:  # this end is closed, and the protocol object has not been told yet
            return False
        if len(info) < INFO.size:
            return True
        num_sent_again, num_probes, silent_ms, num_taken, num_unsent = INFO.unpack(info)
        had_all, self.has_all = self.has_all, not num_unsent
        self.is_done = had_all and self.has_all and num_taken == self._num_taken
        if self.has_all or had_all or num_taken > self._num_taken:
            self._num_taken, self._taken_s = num_taken, now_s
        is_gone = max(num_sent_again, num_probes) >= MAX_UNANSWERED and silent_ms >= GONE_S * 1e3
        return not is_gone and now_s - self._taken_s < STALLED_S


class ConnectionListener(Protocol):
    """What serves a request, and hears of its connection."""

    def resume(self) -> None:
        """Take note that the connection takes bytes again."""

    def lost(self) -> None:
        """Take note that it is gone."""


class Connection(HttpToolsProtocol):
    """One connection. While a request is served, `reply` is told when the connection is writable, or lost."""

    reply: ConnectionListener | None = None
    _timer: asyncio.TimerHandle | None = None  # for the head or body that is being received
    _looking: asyncio.TimerHandle | None = None
    _was_closing = False  # at the last check
    _in_head = True
    _num_head_bytes = 0
    _read_s = 0.0  # when bytes were last received
    _has_ended_another = False  # the bytes received last had the end of the previous request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = Peer(transport.get_extra_info("socket"), self.loop.time())
        self._looking = self.loop.call_later(LOOK_S, self._look)
        if len(self.connections) > MAX_CONNECTIONS + MAX_REFUSED:
            transport.abort()
            return
        if len(self.connections) > MAX_CONNECTIONS:
            text = f"connections: {MAX_CONNECTIONS} are open, the limit"
            self._refuse(Refused(Cause.CONNECTIONS, text))
            return
        self._allow(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._timer, self._looking, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        if self.reply is not None:
            self.reply.lost()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._has_ended_another, self._read_s = False, time.monotonic()
        super().data_received(data)
        if self._in_head and not self._has_ended_another:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large(self._num_head_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._in_head, self._num_head_bytes = True, 0
        if self._timer is None:
            self._allow(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disallow()
        num_bytes = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        if num_bytes > MAX_HEAD_BYTES:
            self.scope["state"]["refused"] = _head_too_large(num_bytes)
        super().on_headers_complete()
        self.scope["state"]["cycle"] = self.cycle
        if not self.pipeline:  # else nothing is read until the previous request is served
            self._allow(BODY_TIMEOUT_S)

    def on_message_complete(self) -> None:
        self._has_ended_another = True
        self.scope["state"]["received_s"] = self._read_s
        self._disallow()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        has_waiting = bool(self.pipeline)
        super().on_response_complete()
        if has_waiting and not self.pipeline and self.cycle.more_body:
            self._allow(BODY_TIMEOUT_S)  # of the last request, which is read from now on

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.reply is not None:
            self.reply.resume()

    def timeout_keep_alive_handler(self) -> None:
        """End a connection that is idle: the peer has the whole last response, and has sent no other request."""
        if self._peer.has_all and not self.flow.write_paused:
            super().timeout_keep_alive_handler()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(LOOK_S, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP. Called by uvicorn."""
        self._refuse(Refused(Cause.INVALID, msg))

    def write_part(self, cycle: RequestResponseCycle, head: bytes, data: bytes, *, is_last: bool) -> bool:
        """Write a part of a chunked response; return whether the connection takes more at once.

        `cycle`: uvicorn's object for the request. `head`: for the first part, status line and headers, each with its
        line end. This replaces ASGI's `send`, which would write the head, the data and the end separately.
        """
        written = b"%x\r\n%b\r\n" % (len(data), data)
        if not cycle.response_started:
            cycle.response_started = True
            close = b"" if cycle.keep_alive else b"connection: close\r\n"
            written = b"%b%btransfer-encoding: chunked\r\n\r\n%b" % (head, close, written)
        self.transport.write(written + b"0\r\n\r\n" if is_last else written)
        if is_last:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                self.transport.close()
            cycle.on_response()
        return not self.flow.write_paused

    def _look(self) -> None:
        """End the connection if the peer does not read, or has everything but does not end TLS."""
        was_closing, self._was_closing = self._was_closing, self.transport.is_closing()
        if not self._peer.reads(self.loop.time()) or (was_closing and self._peer.is_done):
            self.transport.abort()
        self._looking = self.loop.call_later(LOOK_S, self._look)

    def _allow(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _disallow(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(Refused(Cause.TOO_LATE, "the request did not come in time"))

    def _refuse(self, refused: Refused) -> None:
        """Answer without a request, and close."""
        if self.transport.is_closing():
            return
        body = body_of(refused)
        own = (b"content-length", b"%d" % len(body)), (b"connection", b"close")
        head = header_lines(dict((*headers_for(refused), *own)).items())
        self.transport.write(b"HTTP/1.1 %d \r\n%b\r\n%b" % (refused.response.http, head, body))
        self.transport.close()


def header_lines(headers: Iterable[Header]) -> bytes:
    """Return headers as lines of a response. The values must have no line ends."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def _head_too_large(num_bytes: int) -> Refused:
    return Refused(Cause.HEADERS, f"headers: {num_bytes} bytes are over the limit of {MAX_HEAD_BYTES}")
