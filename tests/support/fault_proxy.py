"""A TCP proxy that makes a connection as bad as a test asks: slow, sliced, corrupted, cut off, reset.

Runs in a thread of its own; every method may be called from any thread. Faults hold for all connections, both ways,
from the moment they are set until others are. A `Gate` holds back one message of a gRPC stream, and what follows it.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from grpc_frames import Messages

CHUNK_BYTES = 65536
MAX_CHUNKS_WAITING = 64  # in each direction of a connection; then the source waits
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: close() sends RST


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with a path. The default: nothing."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    slice_bytes: int = CHUNK_BYTES  # what is sent at once
    corrupt_every: int = 0  # one bit of every so many bytes is turned; 0: none
    blackhole: bool = False  # what is sent waits until this ends, as TCP would send it again


HEALTHY = Faults()

Direction = Literal["onward", "back"]  # from who dialled, or to them


class Gate:
    """Holds the first gRPC message of one direction that is wanted, and what follows it on its connection.

    Other connections go on.
    """

    def __init__(self, direction: Direction, wanted: Callable[[bytes], bool]) -> None:
        self.direction = direction
        self.wanted = wanted
        self.opened = asyncio.Event()
        self._caught = threading.Event()

    def stops(self, direction: Direction, message: bytes) -> bool:
        """Return whether a message is the one that is held."""
        return direction == self.direction and not self._caught.is_set() and self.wanted(message)

    def catch(self) -> None:
        self._caught.set()

    def wait_until_caught(self, timeout_s: float = 20) -> None:
        """Return once a message is held; its receiver has everything that was sent before it."""
        assert self._caught.wait(timeout_s), "no such message came"


class _Way:
    """One direction of one connection."""

    def __init__(
        self, proxy: "FaultProxy", direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._proxy = proxy
        self._direction = direction
        self._messages = Messages()
        self._reader = reader
        self._writer = writer
        self._chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS_WAITING)
        self._num_bytes = 0

    async def run(self) -> None:
        """Carry bytes until the source has no more."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._write())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data = await self._reader.read(CHUNK_BYTES)
            await self._chunks.put((loop.time() + self._proxy.faults.latency_s, data))
            if not data:
                return

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await self._chunks.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                self._writer.write_eof()
                return
            gate, num_free = self._proxy.gate, self._num_free(data)
            await self._pass(data[:num_free])
            if num_free < len(data) and gate is not None:
                gate.catch()
                await gate.opened.wait()
                await self._pass(data[num_free:])

    def _num_free(self, data: bytes) -> int:
        """Return how many bytes come before the message that the gate wants; all of them without one."""
        num_free, gate = 0, self._proxy.gate
        for end, message in self._messages.take(data):
            if gate is not None and gate.stops(self._direction, message):
                return num_free
            num_free = end
        return len(data)

    async def _pass(self, data: bytes) -> None:
        while data:
            await self._proxy.passable.wait()
            size, rate = self._proxy.faults.slice_bytes, self._proxy.faults.bytes_per_s
            piece, data = data[:size], data[size:]
            self._writer.write(self._spoilt(piece))
            await self._writer.drain()
            if rate:
                await asyncio.sleep(len(piece) / rate)

    def _spoilt(self, piece: bytes) -> bytes:
        every, start = self._proxy.faults.corrupt_every, self._num_bytes
        self._num_bytes += len(piece)
        if not every:
            return piece
        spoilt = bytearray(piece)
        for place in range(-start % every, len(piece), every):
            spoilt[place] ^= 1
        return bytes(spoilt)


class FaultProxy:
    """Listens at `address` and connects each caller to `target`, host and port, once that is set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.target: tuple[str, int] | None = None
        self.faults = HEALTHY
        self.gate: Gate | None = None
        self.passable = asyncio.Event()
        self.passable.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def set(self, faults: Faults) -> None:
        """Be this bad from now on."""
        self._call(self._set(faults))

    def reset(self) -> None:
        """Cut every connection with a RST on both sides. New ones are welcome."""
        self._call(self._reset())

    @contextmanager
    def having(self, faults: Faults) -> Iterator[None]:
        """Be this bad for the length of the block."""
        self.set(faults)
        try:
            yield
        finally:
            self.set(HEALTHY)

    @contextmanager
    def holding(self, direction: Direction, wanted: Callable[[bytes], bool]) -> Iterator[Gate]:
        """Hold back the first message that is wanted, for the length of the block."""
        gate = Gate(direction, wanted)
        self._call(self._set_gate(gate))
        try:
            yield gate
        finally:
            self._call(self._set_gate(None))

    def close(self) -> None:
        self._call(self._close())

    async def _close(self) -> None:
        self._server.close()
        connections = tuple(self._connections)
        await self._reset()
        if connections:
            await asyncio.wait(connections, timeout=5)

    async def _set(self, faults: Faults) -> None:
        self.faults = faults
        (self.passable.clear if faults.blackhole else self.passable.set)()

    async def _set_gate(self, gate: Gate | None) -> None:
        if self.gate is not None:
            self.gate.opened.set()
        self.gate = gate

    async def _reset(self) -> None:
        for writer in self._writers:
            with suppress(OSError):  # its socket is closed already: its far end was faster
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            writer.transport.abort()
        for connection in self._connections:
            connection.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            assert self.target is not None, "nobody said where to"
            onward_reader, onward_writer = await asyncio.open_connection(*self.target)
            writers.append(onward_writer)
            self._writers.update(writers)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_Way(self, "onward", reader, onward_writer).run())
                tasks.create_task(_Way(self, "back", onward_reader, writer).run())
        except* (OSError, asyncio.CancelledError):
            pass  # one side has gone, and so does the other
        finally:
            self._connections.discard(task)
            self._writers.difference_update(writers)
            for each in writers:
                with suppress(OSError):
                    each.close()


@contextmanager
def fault_proxies(*names: str) -> Iterator[dict[str, FaultProxy]]:
    """Run proxies, one for each name, for the length of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fault proxies", daemon=True)
    thread.start()
    proxies = {name: FaultProxy(loop) for name in names}
    try:
        yield proxies
    finally:
        for proxy in proxies.values():
            proxy.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
