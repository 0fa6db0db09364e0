"""Each decode worker is measured when it is met; what comes of it is told to routers, and a slow way loudly."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
from loopback import loopback_mover

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.base.roles import Role
from pdserve.kvtransfer import speed
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.speed import Probes
from pdserve.proto.v1 import link_pb2 as link
from pdserve.worker.link import Links
from pdserve.worker.messages import Load, RouterRef
from pdserve.worker.reporting import Reporter

DECODE = Peer(WorkerId("decode-0"), Incarnation(1))
LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, draining=False, role=Role.DECODE, role_epoch=0)


@dataclass
class Wire:
    """Takes what is sent to routers."""

    attached: tuple[RouterRef, ...] = (RouterRef(1),)
    sent: asyncio.Queue[tuple[RouterRef, link.PairMeasured]] = field(default_factory=asyncio.Queue)

    def send(self, router: RouterRef, message: link.AttachRequest) -> None:
        if message.HasField("pair"):
            self.sent.put_nowait((router, message.pair))

    def broadcast(self, message: link.AttachRequest) -> None:
        for router in self.attached:
            self.send(router, message)

    async def next(self) -> tuple[RouterRef, link.PairMeasured]:
        async with asyncio.timeout(20):
            return await self.sent.get()


@dataclass
class Scene:
    wire: Wire
    reporter: Reporter
    probes: Probes
    view: np.ndarray[tuple[int, int], np.dtype[np.uint8]]  # the decode worker's pages


@asynccontextmanager
async def scene(slow_bytes_per_s: int = 0) -> AsyncIterator[Scene]:
    pages = np.zeros((4, 4096), np.uint8)
    mine, theirs = (loopback_mover(Region.of(view), lambda _: None) for view in (np.ones_like(pages), pages))
    mine.attach(DECODE, theirs.describe())
    wire = Wire()
    reporter = Reporter(cast("Links", wire), VirtualClock())
    try:
        async with asyncio.TaskGroup() as tasks:
            probes = Probes(mine.probe, reporter.report_pair, tasks, slow_bytes_per_s)
            yield Scene(wire, reporter, probes, pages)
            probes.close()
    finally:
        mine.close()
        theirs.close()


async def test_a_peer_is_measured_once_and_every_router_hears_of_it() -> None:
    async with scene() as it:
        it.probes.start(DECODE)
        it.probes.start(DECODE)
        router, told = await it.wire.next()
        assert (router, told.decode_worker_id, told.carrier, told.is_slow) == (1, "decode-0", "memory", False)
        assert told.bytes_per_s > 0
        assert told.page_us >= 1
        assert not it.view.any()
        it.wire.attached = (RouterRef(1), RouterRef(2))
        it.reporter.beat(LOAD, 0)
        it.reporter.beat(LOAD, 0)
        heard = [it.wire.sent.get_nowait() for _ in range(it.wire.sent.qsize())]
        assert (RouterRef(2), told) in heard
        assert len([router for router, _ in heard if router == 2]) == 1


async def test_a_slow_way_is_called_so_loudly(caplog: pytest.LogCaptureFixture) -> None:
    async with scene(slow_bytes_per_s=10**15) as it:
        it.probes.start(DECODE)
        _, told = await it.wire.next()
        assert told.is_slow
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert record.getMessage().startswith("SLOW: pages reach decode-0 at ")


async def test_a_peer_that_cannot_be_measured_is_only_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    stranger = Peer(WorkerId("stranger"), Incarnation(1))
    async with scene() as it:
        it.probes.start(stranger)
        it.probes.start(DECODE)
        _, told = await it.wire.next()
        assert told.decode_worker_id == "decode-0"
    assert "the way to stranger was not measured" in caplog.text


async def test_a_peer_to_which_there_were_always_copies_is_mentioned_with_that_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "PROBE_TIMEOUT_S", 0.01)
    async with asyncio.TaskGroup() as tasks:
        Probes(lambda _: Future(), lambda *_: pytest.fail("nothing was measured"), tasks, 0).start(DECODE)
    assert "the way to decode-0 was not measured: there were always copies" in caplog.text


async def test_what_is_known_of_a_process_that_has_ended_is_told_no_more() -> None:
    async with scene() as it:
        it.probes.start(DECODE)
        await it.wire.next()
        it.probes.forget(DECODE)
        it.wire.attached = (RouterRef(9),)
        it.reporter.beat(LOAD, 0)
        assert it.wire.sent.empty()
