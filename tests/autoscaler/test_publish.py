"""The actuator that publishes sizes, and a platform that follows them in its own way."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import grpc
import pytest
from actuator_suite import ActuatorSuite, Stage, held, state_of
from shown_metrics import SHOWN

from pdserve.autoscaler.actuator import PublishActuator
from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.journal import Journal
from pdserve.autoscaler.loop import Loop, PolicyFile
from pdserve.autoscaler.observation import Listed, State
from pdserve.autoscaler.server import samples
from pdserve.base.clock import VirtualClock
from pdserve.base.roles import Role
from pdserve.net.operator_client import AdminClient
from pdserve.observe.metrics import DECISIONS, DESIRED
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.admin import demand_to_proto
from pdserve.protocol.link import ROLE_NUMBERS
from pdserve.protocol.reports import Demand


class Platform:
    """A router's view of workers that somebody else starts and ends: as the published sizes say, when it gets to it."""

    def __init__(self) -> None:
        self.workers: dict[str, admin.WorkerStatus] = {}
        self.is_silent = False
        self.actuator = PublishActuator(cast("AdminClient", self))
        self.roles: dict[str, Role] = {}
        self.attach("prefill-0", Role.PREFILL)
        self.attach("decode-0", Role.DECODE)

    async def status(self) -> admin.ClusterStatus:
        if self.is_silent:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
        demand = demand_to_proto(Demand())
        return admin.ClusterStatus(router_id="router", workers=self.workers.values(), demand=demand)

    async def statuses(self) -> list[admin.ClusterStatus]:
        return [await self.status()]

    async def report(self, decisions: Sequence[str]) -> None:
        """Nobody watches."""

    def attach(self, name: str, role: Role) -> None:
        registration = link.Register(worker_id=name, role=ROLE_NUMBERS[role], ready=True)
        self.workers[name] = admin.WorkerStatus(registration=registration)

    async def make_ready(self, name: str) -> None:
        self.attach(name, Role(name.partition("-")[0]))

    async def kill(self, name: str) -> None:
        await self.actuator.observe()
        del self.workers[name]

    async def until_gone(self, name: str) -> None:
        """End workers as a stateful set does, the last one of a pool first, until there are as many as published."""
        for role, size in self.actuator.sizes.items():
            names = sorted(each for each in self.workers if each.startswith(role.value))
            for surplus in names[size:]:
                del self.workers[surplus]
        assert name not in self.workers

    def let_drains_last(self) -> None:
        """Nothing here ends before it is asked to."""

    async def fall_silent(self) -> None:
        self.is_silent = True


class TestPublishActuator(ActuatorSuite):
    @pytest.fixture
    def stage(self) -> Platform:
        return Platform()

    async def test_a_role_is_given_while_the_replica_serves(self, stage: Stage) -> None:
        """Nobody gives one here: a replica leaves one pool and comes to the other."""
        actuator = cast("Platform", stage).actuator
        for _ in range(2):
            await actuator.flip("decode-0", Role.PREFILL)
        assert actuator.sizes == {Role.PREFILL: 2, Role.DECODE: 0}
        assert await state_of(stage, "decode-0") is State.DRAINING
        await stage.make_ready("prefill-1")
        await stage.until_gone("decode-0")
        assert set(await held(stage)) == {"prefill-0", "prefill-1"}
        with pytest.raises(ActuatorError, match="nobody"):
            await actuator.flip("nobody", Role.DECODE)


async def platform_of(*decodes: str) -> Platform:
    platform = Platform()
    for name in decodes:
        platform.attach(name, Role.DECODE)
    await platform.actuator.observe()
    return platform


async def test_a_replica_that_comes_under_another_name_is_the_one_that_was_ordered() -> None:
    platform = await platform_of()
    for _ in range(2):
        await platform.actuator.add("decode-x", Role.DECODE)
    assert (await held(platform))["decode-x"].state is State.STARTING
    platform.attach("pod-7f9c", Role.DECODE)
    assert set(await held(platform)) == {"prefill-0", "decode-0", "pod-7f9c"}
    assert platform.actuator.sizes[Role.DECODE] == 2


async def test_another_replica_that_left_in_place_of_the_one_that_was_drained_will_do() -> None:
    platform = await platform_of("decode-1", "decode-2")
    await platform.actuator.drain("decode-1")
    assert await state_of(platform, "decode-1") is State.DRAINING
    await platform.until_gone("decode-2")
    assert await held(platform) == {
        "prefill-0": Listed("prefill-0", Role.PREFILL, State.READY),
        "decode-0": Listed("decode-0", Role.DECODE, State.READY),
        "decode-1": Listed("decode-1", Role.DECODE, State.READY),
    }
    assert platform.actuator.sizes[Role.DECODE] == 2


async def test_an_order_that_takes_back_an_earlier_one_is_observed_too() -> None:
    platform = await platform_of("decode-1")
    await platform.actuator.drain("decode-1")
    await platform.actuator.add("decode-2", Role.DECODE)
    assert platform.actuator.sizes[Role.DECODE] == 2
    seen = await held(platform)
    assert (seen["decode-1"].state, seen["decode-2"].state) == (State.DRAINING, State.STARTING)
    assert set(await held(platform)) == {"prefill-0", "decode-0", "decode-1"}
    assert await state_of(platform, "decode-1") is State.READY


async def test_a_router_that_starts_again_shrinks_no_pool() -> None:
    platform = await platform_of("decode-1", "decode-2")
    workers, platform.workers = platform.workers, {}
    states = {name: replica.state for name, replica in (await held(platform)).items()}
    assert states == dict.fromkeys(workers, State.STARTING)
    platform.workers = {"decode-0": workers["decode-0"]}
    assert len(await held(platform)) == 4
    assert platform.actuator.sizes == {Role.PREFILL: 1, Role.DECODE: 3}
    platform.workers = workers
    assert all(replica.state is State.READY for replica in (await held(platform)).values())


async def test_a_replica_that_is_still_to_come_is_given_up_at_once() -> None:
    platform = await platform_of()
    await platform.actuator.add("decode-1", Role.DECODE)
    await platform.actuator.drain("decode-1")
    assert platform.actuator.sizes[Role.DECODE] == 1
    assert set(await held(platform)) == {"prefill-0", "decode-0"}


POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 1000, tpotMs: 100}
budget: {maxDevices: 6}
interval: {forecast: 10s, react: 1s}
actuator: {kind: publish}
pools:
  prefill: {minReplicas: 1, maxReplicas: 3, startup: 5s}
  decode: {minReplicas: 3, maxReplicas: 3, startup: 5s}
"""


async def test_who_follows_the_metric_gives_a_pool_its_least_size_and_no_more(tmp_path: Path) -> None:
    file, platform, clock = tmp_path / "policy.yaml", Platform(), VirtualClock()
    file.write_text(POLICY)

    loop = Loop(PolicyFile(file, lambda _: ()), platform, platform.actuator, Journal(None, file), clock)
    seen = []
    for _ in range(30):
        await loop.step()
        clock.advance(1.0)
        shown = list(samples(loop, platform.actuator))
        seen.append(next(each.amount for each in shown if each.metric is DESIRED and each.labels == ("decode",)))
        for number in range(len(platform.workers) - 1, int(seen[-1])):  # a stateful set, which starts one at once
            platform.attach(f"pod-{number}", Role.DECODE)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (2, 3)
    assert len(platform.workers) == 4
    assert {each.metric for each in shown} == set(SHOWN["autoscaler"])
    orders = {each.labels[:2]: each.amount for each in shown if each.metric is DECISIONS if each.labels[1] != "hold"}
    assert orders == {("decode", "add"): 2}
