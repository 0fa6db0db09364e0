"""What is ordered is ordered once, whatever becomes of the answer; a policy is followed whole or not at all."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from pdserve.autoscaler import server
from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.journal import Journal, read_record
from pdserve.autoscaler.loop import Loop, PolicyFile
from pdserve.autoscaler.observation import Listed, State
from pdserve.autoscaler.server import end_replicas
from pdserve.base.errors import CommandError
from pdserve.base.roles import Role
from pdserve.measure.read_workload import warm_up
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.protocol.admin import demand_to_proto
from pdserve.protocol.reports import Demand

POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 1000, tpotMs: 100}
budget: {maxDevices: 6}
interval: {forecast: 10s, react: 1s}
pools:
  prefill: {minReplicas: 1, maxReplicas: 3, startup: 5s}
  decode: {minReplicas: DECODES, maxReplicas: 3, startup: 5s}
"""


@dataclass
class Platform:
    """Starts and ends replicas at once, if it does what it is asked to."""

    replicas: dict[str, Listed] = field(
        default_factory=lambda: {
            "prefill-0": Listed("prefill-0", Role.PREFILL, State.READY),
            "decode-0": Listed("decode-0", Role.DECODE, State.READY),
        }
    )
    orders: list[str] = field(default_factory=list)
    refuses: bool = False
    loses_answers: bool = False
    is_silent: bool = False
    hides: str = ""  # a replica that is not listed yet

    async def observe(self) -> Sequence[Listed]:
        if self.is_silent:
            raise ActuatorError("nobody answers")
        return [held for held in self.replicas.values() if held.name != self.hides]

    async def add(self, name: str, role: Role) -> None:
        self._take(f"add {name}")
        self.replicas.setdefault(name, Listed(name, role, State.STARTING))
        self._answer()

    async def drain(self, name: str) -> None:
        self._take(f"drain {name}")
        self.replicas[name] = replace(self.replicas[name], state=State.DRAINING)
        self._answer()

    async def flip(self, name: str, role: Role) -> None:
        self._take(f"flip {name}")
        self.replicas[name] = replace(self.replicas[name], role=role)
        self._answer()

    def _take(self, order: str) -> None:
        self.orders.append(order)
        if self.refuses:
            raise ActuatorError(f"{order}: no room")

    def _answer(self) -> None:
        if self.loses_answers:
            raise ActuatorError("the answer was lost")

    def make_ready(self, name: str) -> None:
        self.replicas[name] = replace(self.replicas[name], state=State.READY)


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s


class Scene:
    def __init__(self, folder: Path, num_decodes: int = 1) -> None:
        self.clock = Clock()
        self.platform = Platform()
        self.file = folder / "policy.yaml"
        self.record_file = folder / "autoscaler.json"
        self.is_router_silent = self.has_ended = False
        self.reported: list[str] = []  # to the router, of what was decided
        self.write(num_decodes)
        self.start()

    def start(self) -> None:
        """Begin with an autoscaler that remembers nothing."""
        journal = Journal(self.record_file, self.file)
        self.loop = Loop(PolicyFile(self.file, warm_up), self, self.platform, journal, self.clock)

    def check(self) -> None:
        if self.has_ended:
            raise CommandError("it has ended")

    def write(self, num_decodes: int | str) -> None:
        self.file.write_text(POLICY.replace("DECODES", str(num_decodes)))

    async def statuses(self) -> list[admin.ClusterStatus]:
        if self.is_router_silent:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
        return [admin.ClusterStatus(router_id="router", demand=demand_to_proto(Demand()))]

    async def report(self, decisions: Sequence[str]) -> None:
        if self.is_router_silent:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
        self.reported.extend(decisions)

    async def go_on(self, seconds: int) -> None:
        """Go on for some seconds, a step for each."""
        for _ in range(seconds):
            await self.loop.step()
            self.clock.s += 1.0

    def texts(self) -> list[str]:
        return [entry.text for entry in read_record(self.record_file).entries]


async def test_a_pool_below_its_least_gets_one_replica_and_no_second_while_that_starts(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    await scene.go_on(8)
    assert scene.platform.orders == ["add decode-1"]
    scene.platform.make_ready("decode-1")
    await scene.go_on(8)
    assert scene.platform.orders == ["add decode-1"]
    record = read_record(scene.record_file)
    assert [(each.pool, each.num_replicas, each.desired) for each in record.pools] == [
        ("prefill", 1, 1),
        ("decode", 2, 2),
    ]
    assert any(text.startswith("decode: add decode-1; 1 of 2 replicas") for text in scene.texts())


async def test_routers_are_told_what_was_decided_and_why_and_a_silent_one_stops_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    await scene.go_on(3)
    assert scene.reported == scene.texts()
    assert any(text.startswith("decode: add decode-1; 1 of 2 replicas; binds: minReplicas") for text in scene.reported)
    before = len(scene.reported)
    scene.is_router_silent = True
    await scene.go_on(3)
    assert len(scene.reported) == before < len(scene.texts())


async def test_a_refused_order_is_reported_and_given_again_later_by_the_same_name(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    scene.platform.refuses = True
    await scene.go_on(3)
    assert scene.platform.orders == ["add decode-1"]
    assert any("failed" in text and "add decode-1: no room" in text for text in scene.texts())
    scene.platform.refuses = False
    await scene.go_on(30)
    assert scene.platform.orders == ["add decode-1"] * 2


async def test_an_order_whose_answer_is_lost_is_not_doubled(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    scene.platform.loses_answers = True
    await scene.go_on(30)
    assert set(scene.platform.replicas) == {"prefill-0", "decode-0", "decode-1"}
    assert set(scene.platform.orders) == {"add decode-1"}


@pytest.mark.parametrize("was_taken", [True, False])
async def test_an_autoscaler_that_starts_again_in_mid_action_doubles_nothing(tmp_path: Path, was_taken: bool) -> None:
    scene = Scene(tmp_path, num_decodes=3)
    scene.platform.refuses = not was_taken
    await scene.go_on(1)
    scene.platform.refuses = False
    for _ in range(5):
        scene.start()
        await scene.go_on(20)
        for name in list(scene.platform.replicas):
            scene.platform.make_ready(name)
    assert set(scene.platform.replicas) == {"prefill-0", "decode-0", "decode-1", "decode-2"}
    assert len(scene.platform.orders) == 2 + (not was_taken)


async def test_nothing_is_decided_without_an_answer_of_the_actuator(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    scene.platform.is_silent = True
    await scene.go_on(20)
    assert scene.platform.orders == []
    assert scene.texts() == ["nothing is decided: nobody answers"]


async def test_an_autoscaler_ends_with_its_cluster(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.go_on(1)
    scene.platform.is_silent = scene.has_ended = True
    with pytest.raises(CommandError, match="it has ended"):
        await scene.loop.run(asyncio.Event())


async def test_a_second_term_begins_without_orders(tmp_path: Path) -> None:
    scene, stop = Scene(tmp_path, num_decodes=2), asyncio.Event()
    await scene.go_on(1)
    assert scene.loop.last_orders
    stop.set()
    await scene.loop.run(stop)
    assert scene.loop.last_orders == ""


async def test_nothing_is_drained_while_a_router_is_silent(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for number in (1, 2):
        scene.platform.replicas[f"decode-{number}"] = Listed(f"decode-{number}", Role.DECODE, State.READY)
    scene.is_router_silent = True
    await scene.go_on(700)
    assert scene.platform.orders == []
    assert scene.texts().count("a router does not report: UNAVAILABLE: gone") == 1


async def test_a_changed_policy_is_followed_and_says_what_it_changes(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.go_on(5)
    assert scene.platform.orders == []
    scene.write(2)
    await scene.go_on(5)
    assert scene.platform.orders == ["add decode-1"]
    assert "another policy is followed: pools.decode.minReplicas is 2, was 1" in scene.texts()


async def test_a_policy_changed_in_mid_action_gives_no_order_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    scene.platform.hides = "decode-1"
    await scene.go_on(3)
    scene.write(3)
    await scene.go_on(3)
    assert scene.platform.orders == ["add decode-1"]
    scene.platform.hides = ""
    await scene.go_on(3)
    assert scene.platform.orders == ["add decode-1", "add decode-2"]


@pytest.mark.parametrize("broken", ["9", "two", "{", "2, maxReplicas: 3}\nforecaster: {warmupTrace: nowhere.csv}\n#"])
async def test_a_broken_policy_changes_nothing_and_is_reported_once(tmp_path: Path, broken: str) -> None:
    scene = Scene(tmp_path, num_decodes=2)
    scene.write(broken)
    await scene.go_on(10)
    assert scene.platform.orders == ["add decode-1"]
    (text,) = (text for text in scene.texts() if "the policy stays as it was" in text)
    assert "policy.yaml" in text or "nowhere.csv" in text
    scene.file.unlink()
    await scene.go_on(1)
    scene.write(3)
    scene.platform.make_ready("decode-1")
    await scene.go_on(10)
    assert scene.platform.orders == ["add decode-1", "add decode-2"]


class Slow(Platform):
    """Answers the second time that it is asked to drain a replica, which ends at once."""

    async def drain(self, name: str) -> None:
        order = f"drain {name}"
        self._take(order)
        if self.orders.count(order) == 1:
            raise ActuatorError(f"{order}: no answer")
        del self.replicas[name]


async def test_an_end_asks_all_replicas_though_one_does_not_answer_and_asks_again() -> None:
    platform = Slow()
    async with asyncio.timeout(20):
        await end_replicas(platform)
    assert platform.orders == ["drain prefill-0", "drain decode-0"] * 2


async def test_an_end_gives_up_where_nobody_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "END_CHECK_S", 0)
    async with asyncio.timeout(20):
        with pytest.raises(ActuatorError, match="nobody answers"):
            await end_replicas(Platform(is_silent=True))
