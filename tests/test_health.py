"""Probes are answered on a port of their own, by the loop that does the work: one that stands still does not answer."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from probing import health_flags, probe, served

from pdserve.base.errors import ConfigError
from pdserve.net.health import Health, answering
from pdserve.settings.process import ProcessConfig


@contextmanager
def answered(config: ProcessConfig) -> Iterator[tuple[Health, asyncio.AbstractEventLoop]]:
    """Answer probes in a thread, with an event loop of its own, for the length of the block."""
    loop, begun, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Health] = []

    async def answer() -> None:
        async with answering(config) as health:
            found.append(health)
            begun.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(answer(),))
    thread.start()
    assert begun.wait(10)
    try:
        yield found[0], loop
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_process_is_live_then_started_then_ready_and_one_whose_loop_stands_still_does_not_answer() -> None:
    config = ProcessConfig.model_validate(health_flags())
    port, is_ready, thaw = config.health_port, [False], threading.Event()
    with answered(config) as (health, loop):
        assert served(port) == ["live"]
        health.start(lambda: is_ready[0])
        assert served(port) == ["live", "started"]
        is_ready[0] = True
        assert served(port) == ["live", "started", "ready"]
        assert probe(port, "") is True
        loop.call_soon_threadsafe(thaw.wait)
        try:
            assert probe(port, "live", timeout_s=0.3) is None
        finally:
            thaw.set()
        assert probe(port, "live") is True


def test_nothing_but_checks_of_known_services_is_served() -> None:
    config = ProcessConfig.model_validate(health_flags())
    with answered(config) as (health, _), grpc.insecure_channel(health.address) as channel:
        with pytest.raises(grpc.RpcError) as unknown:
            probe(config.health_port, "rea\ndy")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as unserved:
            next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert unserved.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_in_use_is_named() -> None:
    async with answering(ProcessConfig()) as health:
        port = int(health.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"^health_port: cannot listen on 127.0.0.1:{port}"):
            async with answering(ProcessConfig(health_port=port)):
                pass
