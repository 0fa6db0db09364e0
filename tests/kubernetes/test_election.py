"""One of several autoscalers acts, and it has stopped before another one begins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kube_api import Fault
from kube_cluster import REAL, KubeCluster

from pdserve.base.clock import MonotonicClock
from pdserve.kubernetes.client import Client
from pdserve.kubernetes.election import DURATION_S, RENEW_WITHIN_S, Election, Leadership
from pdserve.kubernetes.objects import Lease, LeaseSpec, Metadata


@dataclass
class Candidate:
    """A process whose clock began anywhere, and runs at the rate of the others."""

    election: Election
    offset_s: float

    def now_s(self, at_s: float) -> float:
        return at_s + self.offset_s


def candidate(name: str, offset_s: float = 0.0) -> Candidate:
    return Candidate(Election(name), offset_s)


class Store:
    """The Lease, as the API keeps it."""

    def __init__(self) -> None:
        self.lease = Lease(Metadata(name="lease", resource_version="1"))

    def write(self, seen: Lease, holder: str) -> Lease | None:
        if seen.metadata.resource_version != self.lease.metadata.resource_version:
            return None
        version = str(int(self.lease.metadata.resource_version) + 1)
        spec = LeaseSpec(holder_identity=holder, lease_duration_seconds=DURATION_S)
        self.lease = Lease(Metadata(name="lease", resource_version=version), spec)
        return self.lease


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.floats(0.0, 6.0),  # until then
        st.floats(0.0, 3.0),  # that its look takes
        st.floats(0.0, 3.0),  # that its write takes
        st.sampled_from(["kept", "request lost", "answer lost"]),
    ),
    max_size=60,
)


@given(STEPS, st.floats(-1e6, 1e6))
def test_no_two_act_at_once_whatever_is_lost_or_late_and_whatever_their_clocks_show(
    steps: list[tuple[str, float, float, float, str]], skew_s: float
) -> None:
    store, at_s = Store(), 0.0
    candidates = {"a": candidate("a"), "b": candidate("b", skew_s)}
    for name, wait_s, look_s, write_s, fate in steps:
        at_s += wait_s
        one = candidates[name]
        began_s = one.now_s(at_s)
        seen = store.lease
        at_s += look_s
        one.election.see(seen, one.now_s(at_s))
        if one.election.may_take(one.now_s(at_s)) and fate != "request lost":
            at_s += write_s
            written = store.write(seen, name)
            if written is not None and fate == "kept":
                one.election.renewed(written, began_s)
        acting = [each for each, who in candidates.items() if who.election.leads_for_s(who.now_s(at_s)) > 0]
        assert len(acting) < 2


def test_who_cannot_renew_stops_before_another_one_may_begin() -> None:
    store, first, second = Store(), candidate("a"), candidate("b")
    first.election.see(store.lease, 0.0)
    written = store.write(store.lease, "a")
    assert written is not None
    first.election.renewed(written, 0.0)
    second.election.see(written, 0.1)
    assert first.election.leads_for_s(RENEW_WITHIN_S - 0.1) > 0
    assert first.election.leads_for_s(RENEW_WITHIN_S) == 0
    assert not second.election.may_take(DURATION_S)
    assert second.election.may_take(DURATION_S + 0.2)


def test_a_lease_whose_times_are_of_another_century_is_waited_for_all_the_same() -> None:
    second, store = candidate("b"), Store()
    spec = LeaseSpec(holder_identity="a", lease_duration_seconds=DURATION_S, renew_time="1970-01-01T00:00:00.000000Z")
    store.lease = replace_spec(store.lease, spec)
    second.election.see(store.lease, 100.0)
    assert not second.election.may_take(100.0 + DURATION_S - 0.1)


def replace_spec(lease: Lease, spec: LeaseSpec) -> Lease:
    return Lease(lease.metadata, spec)


class Working:
    """Counts who works at the moment."""

    def __init__(self) -> None:
        self.at_work: list[str] = []
        self.began = asyncio.Condition()
        self.ended = asyncio.Event()

    async def work(self, name: str) -> None:
        assert self.at_work == [], "two work at once"
        self.at_work.append(name)
        async with self.began:
            self.began.notify_all()
        try:
            await asyncio.Event().wait()
        finally:
            self.at_work.remove(name)
            self.ended.set()

    async def until_nobody(self) -> None:
        async with asyncio.timeout(30):
            await self.ended.wait()
        self.ended.clear()

    async def until(self, name: str) -> None:
        async with asyncio.timeout(30), self.began:
            await self.began.wait_for(lambda: self.at_work == [name])


class Autoscaler:
    def __init__(self, kube: KubeCluster, client: Client, name: str, working: Working) -> None:
        self.turns = Leadership(client, kube.namespace, "chat-autoscaler", name, MonotonicClock())
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.turns.run(lambda: working.work(name), self.stop))

    async def end(self) -> None:
        """End as a killed process does not: in order."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def client(kube: KubeCluster) -> AsyncIterator[Client]:
    async with Client.connected() as client:
        yield client


async def test_a_follower_takes_over_at_once_when_the_leader_ends_in_order(kube: KubeCluster, client: Client) -> None:
    working = Working()
    first = Autoscaler(kube, client, "first", working)
    await working.until("first")
    second = Autoscaler(kube, client, "second", working)
    assert first.turns.leads
    await kube.until(lambda: second.turns.holder == "first")
    assert (second.turns.leads, second.turns.holder) == (False, "first")
    await first.end()
    await working.until("second")
    await second.end()


@pytest.mark.skipif(bool(REAL), reason="a fault")
async def test_a_leader_whose_api_is_gone_stops_and_a_conflict_makes_nobody_lead(
    kube: KubeCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kubernetes.election.RENEW_WITHIN_S", 0.5)
    monkeypatch.setattr("pdserve.kubernetes.election.RETRY_S", 0.05)
    assert kube.double is not None
    working = Working()
    conflicts = Fault("PUT", "/leases/", status=409, times=3)
    kube.double.faults.append(conflicts)
    first = Autoscaler(kube, client, "first", working)
    await working.until("first")
    assert conflicts.times == 0
    kube.double.faults.append(Fault("ANY", "/leases/", lose="hang"))
    await working.until_nobody()
    assert not first.turns.leads
    kube.double.faults.clear()
    await working.until("first")
    await first.end()


@pytest.mark.skipif(bool(REAL), reason="a fault")
async def test_a_leader_whose_renewal_failed_at_once_stops_when_its_lead_ends_though_the_api_hangs_then(
    kube: KubeCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kubernetes.election.RENEW_WITHIN_S", 0.5)
    monkeypatch.setattr("pdserve.kubernetes.election.RETRY_S", 0.3)
    assert kube.double is not None
    working = Working()
    first = Autoscaler(kube, client, "first", working)
    await working.until("first")
    refused = Fault("GET", "/leases/", status=403, times=1)
    kube.double.faults += [refused, Fault("ANY", "/leases/", lose="hang")]
    async with asyncio.timeout(3):  # less than the time that a look at the Lease may take
        await working.until_nobody()
    assert (refused.times, first.turns.leads) == (0, False)
    await first.end()
