"""Every heartbeat of a prefill worker says how many peers take no bytes, whatever made the worker send it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from scripted_backend import FIRST, scripted_rig
from stream_ends import Heard

from pdserve.base.clock import VirtualClock
from pdserve.base.roles import Role
from pdserve.kvtransfer.client import HandoffClient
from pdserve.kvtransfer.doors import OutgoingEvent
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.server import HandoffServicer
from pdserve.kvtransfer.session import Introduction
from pdserve.kvtransfer.speed import WINDOW_S, Probes
from pdserve.net.credentials import Credentials
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.worker.inbox import Inbox
from pdserve.worker.link import Links
from pdserve.worker.messages import Load, RouterRef
from pdserve.worker.outbox import Carriers, Outbox
from pdserve.worker.reporting import LOAD_EVERY_S, Reporter

LOAD = Load(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, draining=False, role=Role.DECODE, role_epoch=0)


@dataclass
class Wire:
    """Takes what is sent to two routers."""

    attached: tuple[RouterRef, ...] = (RouterRef(1), RouterRef(2))
    sent: list[link.AttachRequest] = field(default_factory=list)

    def send(self, router: RouterRef, message: link.AttachRequest) -> None:
        self.sent.append(message)


async def test_a_heartbeat_between_two_beats_tells_of_stalled_peers_too() -> None:
    with scripted_rig() as rig:
        rig.write(FIRST, 1)
        rig.backend.until(lambda: len(rig.backend.posted) == 1)
        rig.clock.advance(WINDOW_S)
        rig.backend.let_it_look()
        wire, clock, mover = Wire(), VirtualClock(), cast("Mover", rig.mover)
        reporter = Reporter(cast("Links", wire), clock)
        me = Introduction(FIRST, KvLayout("", 1, 1, 1, 1, "float32"))
        async with asyncio.TaskGroup() as tasks:
            client = HandoffClient(me, mover, Credentials(b"s" * 32), Heard[OutgoingEvent](), tasks, Counter())
            probes = Probes(mover.probe, reporter.report_pair, tasks, 0)
            carriers = Carriers(client, cast("HandoffServicer", None), mover, probes)
            outbox = Outbox(carriers, reporter, Inbox(), tasks, clock)
            outbox.beat(LOAD, 0)
            clock.advance(LOAD_EVERY_S)
            outbox.refresh(lambda: LOAD, 0, at_once=False)
            outbox.refresh(lambda: LOAD, 0, at_once=True)
    assert [message.heartbeat.num_stalled_peers for message in wire.sent] == [1] * 6
