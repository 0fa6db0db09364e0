"""A prefill worker whose mover's thread hangs ends its process: as long as it lives, peers keep pages back."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from stream_ends import Heard

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, PageId, Peer, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.kvtransfer.backends.backend import Indices, Way
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.doors import HEARTBEAT_S, OutgoingEvent, StartCopy
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.session import Introduction
from pdserve.kvtransfer.speed import Probes
from pdserve.net.credentials import Credentials
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.worker.inbox import Inbox
from pdserve.worker.link import Links
from pdserve.worker.messages import Event, Load
from pdserve.worker.outbox import HUNG_MOVER_S, Carriers, Outbox
from pdserve.worker.reporting import Reporter

SECRET = b"s" * 32
KEY = AttemptKey(RequestId(bytes(16)), Attempt(0))
PEER = Peer(WorkerId("decode-0"), Incarnation(2))
LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, draining=False, role=Role.DECODE, role_epoch=0)
LONG_ENOUGH = int(HUNG_MOVER_S / HEARTBEAT_S) + 2  # beats


class HangingBackend:
    """A library that does not return from the first look at a write until a test lets it."""

    name = "hanging"
    carrier = "script"
    metadata = b""

    def __init__(self) -> None:
        self.region = Region.of(np.zeros((2, 64), np.uint8))
        self.is_looking, self.may_return = threading.Event(), threading.Event()

    def begin(self) -> None:
        pass

    def progress(self) -> None:
        pass

    def connect(self, way: Way, source: Region) -> "HangingBackend":
        return self

    def post(self, src: Indices, dst: Indices) -> "HangingBackend":
        return self

    def has_landed(self) -> bool:
        self.is_looking.set()
        self.may_return.wait(20)
        return True

    def cut(self, peer: Peer) -> None:
        pass

    def close(self, *, in_flight: bool = False) -> None:
        pass


def not_dismissed(why: str) -> None:
    raise AssertionError(why)


@pytest.fixture
def backend() -> Iterator[HangingBackend]:
    backend = HangingBackend()
    yield backend
    backend.may_return.set()


async def test_a_movers_thread_that_hangs_ends_the_process_and_one_that_rests_does_not(
    backend: HangingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    clock = VirtualClock()
    mover = Mover(backend, lambda _: None)
    mover.attach(PEER, mover.describe())
    reporter = Reporter(Links((), Credentials(SECRET), link.Register(), Heard[Event](), not_dismissed), clock)
    me = Introduction(PEER, KvLayout("", 1, 1, 1, 1, "float32"))
    async with asyncio.TaskGroup() as tasks:
        client = HandoffClient(me, mover, Credentials(SECRET), Heard[OutgoingEvent](), tasks, Counter())
        probes = Probes(mover.probe, reporter.report_pair, tasks, 0)
        carriers = Carriers(client, cast("HandoffServicer", None), mover, probes)
        outbox = Outbox(carriers, reporter, Inbox(), tasks, clock)

        def beat() -> None:
            for _ in range(LONG_ENOUGH):
                clock.advance(HEARTBEAT_S)
                outbox.beat(LOAD, 0)

        assert any(mover.turn is None for _ in range(10_000_000)), "it soon has nothing to do; nobody is told when"
        beat()
        assert ended == []
        outbox.perform([StartCopy(PEER, KEY, (PageId(0),), (PageId(1),))], None)
        assert await asyncio.to_thread(backend.is_looking.wait, 10)
        beat()
        assert ended[0] == 70
    backend.may_return.set()
    await asyncio.to_thread(mover.close)
