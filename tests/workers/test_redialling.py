"""A prefill worker dials decode workers again that it lost, as many of them as it remembers."""

import pytest
from lone_core import LoneCore, job

from pdserve.base.ids import Incarnation, Peer, WorkerId
from pdserve.kvtransfer.doors import HEARTBEAT_S, Connect, ReceiverAttached, ReceiverLost
from pdserve.prefill_worker.outgoing import MAX_ADDRESSES, REDIAL_S
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Cancelled, Command, Placed, RouterRef, Ticked


@pytest.fixture
def core() -> WorkerCore:
    return LoneCore(32, 64).core


def meet(core: WorkerCore, number: int, *, again: bool = False) -> Peer:
    """Be given a request whose decode worker is that one, and told to stop it."""
    peer = Peer(WorkerId(f"d{number}"), Incarnation(1))
    asked = job(number + again * 2 * MAX_ADDRESSES, 2)
    core.handle(Placed(RouterRef(1), asked, 1e9, target=peer, target_address=f"host:{number}"), 0.0)
    core.handle(Cancelled(*asked.key), 0.0)
    return peer


def dialled(commands: list[Command]) -> list[str]:
    return [command.address for command in commands if isinstance(command, Connect)]


def test_a_lost_peer_is_dialled_again_once_for_each_loss(core: WorkerCore) -> None:
    peer = meet(core, 0)
    core.handle(ReceiverLost(peer, "reset"), 0.0)
    assert dialled(core.handle(Ticked(), 0.5)) == ["host:0"]
    assert dialled(core.handle(Ticked(), 1.0)) == []


def test_of_too_many_peers_the_one_that_was_met_longest_ago_is_forgotten(core: WorkerCore) -> None:
    first, second = meet(core, 0), meet(core, 1)
    for number in range(2, MAX_ADDRESSES):
        meet(core, number)
    core.handle(ReceiverLost(second, "reset"), 0.0)
    meet(core, 0, again=True)
    core.handle(ReceiverLost(first, "reset"), 0.0)
    meet(core, MAX_ADDRESSES)
    assert dialled(core.handle(Ticked(), 0.5)) == ["host:0"]


def fail_for(core: WorkerCore, peer: Peer, begin_s: float, end_s: float) -> float:
    """Let every try to reach a peer fail; return when it was last dialled."""
    last_s = now_s = begin_s
    while now_s < end_s:
        now_s += HEARTBEAT_S
        if dialled(core.handle(Ticked(), now_s)):
            last_s = now_s
            core.handle(ReceiverLost(peer, "refused"), now_s)
    return last_s


def test_a_peer_that_is_gone_for_good_is_dialled_for_ten_minutes_however_often_that_fails(core: WorkerCore) -> None:
    peer = meet(core, 0)
    core.handle(ReceiverLost(peer, "reset"), 0.0)
    assert REDIAL_S - 1.0 < fail_for(core, peer, 0.0, 3 * REDIAL_S) < REDIAL_S


def test_a_stream_that_stood_again_gives_its_peer_the_whole_time_anew(core: WorkerCore) -> None:
    peer = meet(core, 0)
    core.handle(ReceiverLost(peer, "reset"), 0.0)
    fail_for(core, peer, 0.0, REDIAL_S / 2)
    core.handle(Ticked(), REDIAL_S / 2)
    core.handle(ReceiverAttached(peer), REDIAL_S / 2)
    core.handle(ReceiverLost(peer, "reset"), REDIAL_S)
    assert 2 * REDIAL_S - 1.0 < fail_for(core, peer, REDIAL_S, 3 * REDIAL_S) < 2 * REDIAL_S


def test_a_peer_that_a_router_names_again_is_dialled_again(core: WorkerCore) -> None:
    peer = meet(core, 0)
    core.handle(ReceiverLost(peer, "reset"), 0.0)
    fail_for(core, peer, 0.0, 2 * REDIAL_S)
    meet(core, 0, again=True)
    core.handle(ReceiverLost(peer, "refused"), 2 * REDIAL_S)
    assert dialled(core.handle(Ticked(), 2 * REDIAL_S + HEARTBEAT_S)) == ["host:0"]
