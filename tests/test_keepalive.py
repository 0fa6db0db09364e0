"""A frozen process, whose kernel still acknowledges packets, is given up in 15 s by both ends of a stream."""

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
import stream_peer

GIVEN_UP_S = 15.0  # a ping after 10 s without a message, and 5 s for its answer
LATE_S = 4.0  # for a busy machine


@pytest.mark.slow
@pytest.mark.long
async def test_a_frozen_process_is_given_up_by_whoever_dialled_it_and_whoever_it_dialled() -> None:
    stands, ended = asyncio.Event(), asyncio.Event()
    server, port = await stream_peer.listening(ended.set)
    command = (sys.executable, str(Path(stream_peer.__file__)), str(port))
    peer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert peer.stdout is not None
        dialled = asyncio.create_task(stream_peer.hold_stream(int(await peer.stdout.readline()), stands.set))
        await stands.wait()
        peer.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(GIVEN_UP_S + LATE_S):
            with pytest.raises(grpc.aio.AioRpcError) as given_up:
                await dialled
            assert given_up.value.code() is grpc.StatusCode.UNAVAILABLE
            await ended.wait()
    finally:
        peer.kill()
        await peer.wait()
        await server.stop(None)
