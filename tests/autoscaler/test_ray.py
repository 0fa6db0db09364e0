"""Ray as actuator: a real head and real actors, with workers that only sleep."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import lone_process
import psutil
import pytest
import ray
from actuator_suite import ActuatorSuite, held
from admin_stub import Router, serving
from probing import health_flags, until_served
from ray.exceptions import RayError
from ray_nodes import RayNodes, end_node, ray_head

from pdserve.autoscaler.observation import State
from pdserve.autoscaler.ray import ActorActuator, Ledger, connect
from pdserve.autoscaler.schema import RayActuator as Settings
from pdserve.base.roles import Role
from pdserve.launch import plan as plan_module
from pdserve.launch.folder import ClusterState, write_secret
from pdserve.launch.owner import OwnedWorker
from pdserve.launch.plan import PDSERVE, ClusterSpec, Wiring, flag_arguments
from pdserve.net.operator_client import AdminClient

pytestmark = [pytest.mark.slow, pytest.mark.long]  # Ray takes long to start

SLEEPER = (sys.executable, "-I", "-c", "import signal; signal.pause()")
DEAF = (sys.executable, "-I", "-c", "import signal; signal.pthread_sigmask(0, {15}); print(1); signal.pause()")
DEVICES = dict.fromkeys(Role, 1)
POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 60000, tpotMs: 60000}
budget: {maxDevices: 2}
pools:
  prefill: {maxReplicas: 1, startup: 1s}
  decode: {maxReplicas: 1, startup: 1s}
actuator: {kind: ray, address: ADDRESS, resourcesPerDevice: {CPU: 1}}
"""


def _is_deaf(pid: int) -> bool:
    """Whether a process has come so far that SIGTERM does not end it."""
    blocked = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
    return bool(int(blocked, 16) & 1 << signal.SIGTERM - 1)


def _runs(process: psutil.Process) -> bool:
    """Whether a process computes still: one that nobody has reaped yet does not."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


class RayStage:
    def __init__(self, nodes: RayNodes, router: Router, wiring: Wiring) -> None:
        self._nodes = nodes
        self.router = router
        self._operator = AdminClient(wiring.router, wiring.secret_file)
        self._wiring = wiring
        self._monkeypatch = pytest.MonkeyPatch()
        self.let_workers_run(SLEEPER)
        self._are_deaf = False
        self._frozen: list[psutil.Process] = []
        self.actuator = self.another(timeout_s=20.0)

    def another(self, timeout_s: float, resources: dict[str, float] | None = None) -> ActorActuator:
        settings = Settings(resources_per_device=resources or {"CPU": 0.1}, timeout_s=timeout_s)
        return ActorActuator(self._wiring, self._operator, settings, DEVICES)

    @property
    def roles(self) -> dict[str, Role]:
        return self.router.roles

    async def worker(self, name: str) -> OwnedWorker:
        actor = ray.get_actor(f"pdserve/{self._wiring.spec.name}/{name}")
        return await asyncio.to_thread(ray.get, actor.worker.remote(), timeout=20)

    async def latest(self, name: str) -> OwnedWorker | None:
        """Return the worker, or nothing while its actor does not answer."""
        with suppress(RayError):
            return await self.worker(name)
        return None

    async def make_ready(self, name: str) -> None:
        async with asyncio.timeout(20):
            while (worker := await self.worker(name)).pid is None or (self._are_deaf and not _is_deaf(worker.pid)):
                pass
        self.router.ready[name] = worker.incarnation

    async def kill(self, name: str) -> None:
        before = await self.worker(name)
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while (await self.worker(name)).pid == before.pid:
                pass

    async def until_gone(self, name: str) -> None:
        async with asyncio.timeout(20):
            while name in {each.name for each in await self.actuator.observe()}:
                pass

    def let_workers_run(self, command: tuple[str, ...]) -> None:
        self._monkeypatch.setattr(plan_module, "PDSERVE", command)

    def let_drains_last(self) -> None:
        self.let_workers_run(DEAF)
        self._are_deaf = True  # those that are made ready from now on

    async def fall_silent(self) -> None:
        self.actuator = self.another(timeout_s=0.2)
        self._frozen = [each for each in self._nodes.all_processes() if "gcs_server" in each.name()]
        for process in self._frozen:
            process.suspend()
        self.router.ready.clear()

    async def close(self) -> None:
        for process in self._frozen:
            process.resume()
        self._monkeypatch.undo()
        prefix = f"pdserve/{self._wiring.spec.name}/"
        for name in await asyncio.to_thread(ray.util.list_named_actors):
            if name.startswith(prefix):
                await asyncio.to_thread(ray.kill, ray.get_actor(name))


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_head(num_cpus=2) as nodes:
        connect(Settings(address=nodes.address))
        try:
            yield nodes
        finally:
            ray.shutdown()


@pytest.fixture
async def stage(nodes: RayNodes, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[RayStage]:
    router, secret = Router(), write_secret(tmp_path)
    async with serving(router, secret) as address:
        spec = ClusterSpec("m", "m", name=request.node.name[:40], worker_flags={"drain_timeout_s": 20.0})
        port = int(address.rpartition(":")[2])
        wiring = Wiring(spec, public_port=1, internal_port=port, secret_file=secret)
        stage = RayStage(nodes, router, wiring)
        try:
            for name, role in (("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)):
                await stage.actuator.add(name, role)
            for name in ("prefill-0", "decode-0"):
                await stage.make_ready(name)
            yield stage
        finally:
            await stage.close()


class TestRayActuator(ActuatorSuite):
    pass


async def test_the_end_of_a_process_is_reported_before_its_actor_ends(stage: RayStage) -> None:
    worker = await stage.worker("decode-0")
    await stage.actuator.drain("decode-0")
    await stage.until_gone("decode-0")
    assert ("decode-0", worker.incarnation) in stage.router.gone


async def test_a_worker_has_the_priority_of_its_node(stage: RayStage) -> None:
    assert psutil.Process((await stage.worker("decode-0")).pid).nice() == psutil.Process().nice()


async def test_another_actuator_finds_what_the_first_one_added(stage: RayStage) -> None:
    before = await held(stage)
    stage.actuator = stage.another(timeout_s=20.0)
    assert await held(stage) == before
    await stage.actuator.add("decode-0", Role.DECODE)
    assert await held(stage) == before


async def test_a_killed_actor_is_back_with_the_same_worker_once_the_former_process_has_ended(stage: RayStage) -> None:
    before = await stage.worker("decode-0")
    former = psutil.Process(before.pid)
    owner = former.parent()
    assert owner is not None
    owner.kill()
    async with asyncio.timeout(60):
        while (after := await stage.latest("decode-0")) is None or after.incarnation in (0, before.incarnation):
            pass
    assert after.worker_id == before.worker_id
    assert after.incarnation > before.incarnation
    assert not _runs(former)


async def test_a_worker_of_a_lost_machine_gets_another_id_elsewhere(nodes: RayNodes) -> None:
    ledger = Ledger("pdserve/lost/decode-0", "pdserve")
    lives = [await asyncio.to_thread(ledger.begin, here) for here in ("one machine", "one machine", "another")]
    assert lives == [1, 1, 2]
    await asyncio.to_thread(ledger.end)
    assert await asyncio.to_thread(ledger.begin, "a third") == 2  # the first one's end is still not proved


async def test_workers_of_a_killed_node_start_on_another_one(nodes: RayNodes, stage: RayStage) -> None:
    first = nodes.start(f"--address={nodes.address}", "--num-cpus=0", '--resources={"beside": 1}')
    actuator = stage.another(timeout_s=20.0, resources={"beside": 1})
    await actuator.add("decode-9", Role.DECODE)
    await stage.make_ready("decode-9")
    former = psutil.Process((before := await stage.worker("decode-9")).pid)
    end_node(first)
    nodes.start(f"--address={nodes.address}", "--num-cpus=0", '--resources={"beside": 1}')
    async with asyncio.timeout(50):
        while (after := await stage.latest("decode-9")) is None or after.incarnation in (0, before.incarnation):
            pass
    assert after.worker_id == "decode-9"  # both nodes are this machine, where the former process is known to be gone
    assert not _runs(former)


async def test_a_worker_that_refuses_its_flags_is_not_started_again_and_leaves_when_asked(
    stage: RayStage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.let_workers_run((sys.executable, "-I", "-c", "print('no such model'); raise SystemExit(2)"))
    await stage.actuator.add("decode-1", Role.DECODE)
    async with asyncio.timeout(20):
        while "no such model" not in caplog.text:
            assert (await held(stage))["decode-1"].state is not State.READY
    await stage.actuator.drain("decode-1")
    await stage.until_gone("decode-1")


def test_a_signal_ends_an_autoscaler_on_ray_without_a_stack_trace(nodes: RayNodes, tmp_path: Path) -> None:
    folder = tmp_path / "pdserve" / "c"
    folder.mkdir(parents=True)
    spec, secret = ClusterSpec("m", "m", name="c"), write_secret(folder)
    wiring = Wiring(spec, public_port=1, internal_port=1, secret_file=secret)  # where no router answers
    state = ClusterState(
        name="c",
        supervisor_pid=os.getpid(),
        endpoint=wiring.router,
        admin=wiring.router,
        secret_file=wiring.secret_file,
        model="m",
        ready=True,
        processes=(),
        elsewhere=wiring,
    )
    (folder / "state.json").write_text(state.model_dump_json())
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("ADDRESS", nodes.address))
    flags = {"name": "c", "policy": policy, **health_flags()}
    with lone_process.process([*PDSERVE, "autoscale", "run", *flag_arguments(flags)], tmp_path) as running:
        until_served(flags["health_port"], ["live", "started", "ready"])
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "SIGTERM received" not in said, said
