"""Ray as actuator: each worker is owned by a named, detached actor, which starts its process and ends it.

Requests, tokens and pages never pass through Ray. An actor that dies takes its worker along, and Ray starts it again.
On another machine the worker gets another id: the lost machine may still run the former process, and nothing proves
its end.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import ray
from pydantic import BaseModel
from ray.autoscaler.sdk import request_resources
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import internal_kv

import pdserve
from pdserve.autoscaler.actuator import give_role, ordering
from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.observation import Listed, State
from pdserve.autoscaler.schema import RayActuator as Settings
from pdserve.base.errors import ConfigError, first_of
from pdserve.base.roles import Role
from pdserve.launch.claim import OWNER, Claim
from pdserve.launch.devices import check_devices
from pdserve.launch.folder import runtime_dir
from pdserve.launch.owner import Order, OwnedWorker, Owner, machine
from pdserve.launch.plan import Wiring
from pdserve.launch.service import WORKERS_END_S
from pdserve.net.operator_client import AdminClient

logger = logging.getLogger(__name__)

MAX_CALLS = 4  # of Ray at once, with those that still block after their time limit
STATE_TIMEOUT_S = 1.0  # for an actor to report its worker; then its last report counts
PRIORITY = {"RAY_worker_niceness": "0"}  # actors, and so their workers, are as nice as the node; Ray's default adds 15
CLEARED = ("RAY_", "OMP_NUM_THREADS")  # what Ray sets in an actor's environment is not for the worker

T = TypeVar("T")


class Life(BaseModel, frozen=True, extra="forbid"):
    """Which of a worker's ids is in use, and where."""

    number: int = 1  # counts machines that were lost with the worker
    machine: str = ""  # empty: the worker has ended


class Ledger:
    """What Ray's control service keeps of one worker, beyond the life of its actor."""

    def __init__(self, actor: str, namespace: str) -> None:
        self._actor = actor
        self._space = f"pdserve.{namespace}"

    def begin(self, here: str) -> int:
        """Return the number of the life that begins here: a greater one unless the last is known to have ended."""
        last = self.life()
        number = last.number if last.machine in ("", here) else last.number + 1
        self._write("life", Life(number=number, machine=here).model_dump_json())
        return number

    def end(self) -> None:
        """Take note that the worker has ended, and no process of this life runs."""
        self._write("life", Life(number=self.life().number).model_dump_json())

    def life(self) -> Life:
        text = self._read("life")
        return Life() if text is None else Life.model_validate_json(text)

    @property
    def role(self) -> Role | None:
        """The role that the worker was added with."""
        text = self._read("role")
        return None if text is None else Role(text)

    @role.setter
    def role(self, role: Role) -> None:
        self._write("role", role.value)

    def _read(self, key: str) -> str | None:
        found: bytes | None = internal_kv._internal_kv_get(f"{self._actor}/{key}", namespace=self._space)
        return None if found is None else found.decode()

    def _write(self, key: str, text: str) -> None:
        internal_kv._internal_kv_put(f"{self._actor}/{key}", text, overwrite=True, namespace=self._space)


class WorkerActor:
    """Owns a worker's process. Its methods are coroutines, so that Ray runs all of it in one event loop."""

    def __init__(self, order: Order) -> None:
        context = ray.get_runtime_context()
        self._me = context.current_actor
        name, namespace = str(context.get_actor_name()), str(context.namespace)
        folder = runtime_dir(order.cluster) / "ray"
        (folder / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = f"{namespace}/{name}"
        claim = Claim(folder / f"{order.spec.name}.lock", owner)  # an earlier actor may not have ended yet
        self._ledger = Ledger(name, namespace)
        life = self._ledger.begin(machine())
        worker_id = order.spec.name if life == 1 else f"{order.spec.name}.{life}"
        own = {"--worker-id": worker_id, "--handoff-host": ray.util.get_node_ip_address()}
        cpus = int(context.get_assigned_resources().get("CPU", 0))
        if cpus and "--num-threads" not in order.spec.command:
            own["--num-threads"] = str(cpus)
        _, *arguments = order.spec.command
        command = (sys.executable, *arguments, *(part for pair in own.items() for part in pair))
        spec = replace(order.spec, name=worker_id, command=command)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(CLEARED)}
        self._owner = Owner(replace(order, spec=spec), folder / "logs", {**kept, OWNER: owner}, claim)
        self._refusal = ""
        self._asked = asyncio.Event()  # to end
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def worker(self) -> OwnedWorker:
        """Return the worker at this moment."""
        if self._refusal and not self._asked.is_set():
            return replace(self._owner.worker, leaving=False, refusal=self._refusal)
        return self._owner.worker

    async def drain(self) -> None:
        """Let the worker drain and end; this actor ends after it."""
        self._asked.set()
        self._owner.retire()

    async def leave(self) -> None:
        """End this actor for good."""
        ray.actor.exit_actor()

    async def _keep(self) -> None:
        try:
            await self._owner.run()
        except ExceptionGroup as group:
            refusal = first_of(group, ConfigError)
            if refusal is None:
                logger.exception("the worker is given up")
                os._exit(1)  # Ray starts this actor again
            self._refusal = str(refusal)
            await self._asked.wait()  # another start would be refused too
        self._ledger.end()
        self._me.leave.remote()


class ActorActuator:
    """Replicas are actors of Ray."""

    def __init__(
        self, wiring: Wiring, router: AdminClient, settings: Settings, num_devices: Mapping[Role, int]
    ) -> None:
        """Ray is connected already. `num_devices`: of a replica of each role."""
        self._wiring = wiring
        self._router = router
        self._settings = settings
        self._num_devices = num_devices
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="ray")
        self._prefix = f"pdserve/{wiring.spec.name}/"
        self._seen: dict[str, OwnedWorker] = {}  # as their actors last reported them
        self._roles: dict[str, Role] = {}  # of all that are here, as they were added
        self._serving: set[tuple[str, int]] = set()  # worker ids and incarnations that the router reports as ready

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, wiring: Wiring, router: AdminClient, settings: Settings, num_devices: Mapping[Role, int]
    ) -> AsyncIterator[Self]:
        """Be connected with Ray for the length of the block; ActuatorError where Ray is not reached."""
        check_devices(wiring.spec, num_devices)
        try:
            await asyncio.to_thread(connect, settings)
        except (OSError, RuntimeError, ValueError) as error:
            raise ActuatorError(f"Ray at {settings.address or 'its usual address'}: {error}") from error
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # Ray's native handler writes a stack trace
        try:
            yield cls(wiring, router, settings, num_devices)
        finally:
            await asyncio.to_thread(ray.shutdown)

    async def observe(self) -> Sequence[Listed]:
        """Return all workers that have an actor. One whose actor does not answer is taken to be as it was."""
        await self._call("list the workers", self._look)
        with suppress(TimeoutError, grpc.aio.AioRpcError):  # then they are taken to serve as they did
            async with asyncio.timeout(self._settings.timeout_s):
                status = await self._router.status()
            ready = [worker.registration for worker in status.workers if worker.registration.ready]
            self._serving = {(worker.worker_id, worker.incarnation) for worker in ready}
        return [self._listed(name, role) for name, role in self._roles.items()]

    async def add(self, name: str, role: Role) -> None:
        """Have an actor start a worker, unless there is one of this name."""
        await self._call(f"add {name}", lambda: self._add(name, role))

    async def drain(self, name: str) -> None:
        """Have a worker's actor let it drain and end, and end itself."""
        await self._call(f"drain {name}", lambda: self._drain(name))

    async def flip(self, name: str, role: Role) -> None:
        """Give a worker another role while it serves."""
        worker = self._seen.get(name)
        await give_role(self._router, name if worker is None else worker.worker_id, role, self._settings.timeout_s)

    async def _call(self, what: str, call: Callable[[], T]) -> T:
        """Call Ray, which blocks, in a thread."""
        async with ordering(what, self._settings.timeout_s, RayError, OSError, RuntimeError, ValueError):
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _listed(self, name: str, role: Role) -> Listed:
        worker = self._seen.get(name)
        if worker is None:
            return Listed(name, role, State.STARTING)
        serves = (worker.worker_id, worker.incarnation) in self._serving and worker.pid is not None
        state = State.DRAINING if worker.leaving else State.READY if serves else State.STARTING
        return Listed(name, role, state, "" if worker.worker_id == name else worker.worker_id)

    def _look(self) -> None:
        listed = [name for name in ray.util.list_named_actors() if name.startswith(self._prefix)]
        actors = {name.removeprefix(self._prefix): actor for name in listed if (actor := _actor(name)) is not None}
        answers = {name: actor.worker.remote() for name, actor in actors.items()}
        if answers:
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=self._state_timeout_s)
        seen = {name: self._seen[name] for name in answers if name in self._seen}
        for name, answer in answers.items():
            with suppress(RayError):  # no answer yet, or it is being started again
                worker, before = ray.get(answer, timeout=0), seen.get(name)
                if worker.refusal and (before is None or before.refusal != worker.refusal):
                    logger.warning("%s", worker.refusal)
                seen[name] = worker
                if worker.router != self._wiring.router and not worker.leaving:
                    actors[name].drain.remote()  # it serves an earlier cluster of this name
        self._seen = seen
        roles = {name: self._roles.get(name) or self._ledger(name).role for name in answers}
        self._roles = {name: role for name, role in roles.items() if role is not None}

    def _add(self, name: str, role: Role) -> None:
        actor = _actor(self._prefix + name)
        if actor is not None:
            with suppress(GetTimeoutError):  # it starts, or its node is busy: in any case it is there
                if ray.get(actor.worker.remote(), timeout=self._state_timeout_s).leaving:
                    raise ActuatorError("it is still draining")
            return
        self._ledger(name).role = role
        self._request_nodes({**self._roles, name: role})
        spec = self._wiring.spec
        order = Order(
            spec=self._wiring.worker(name, role),
            cluster=spec.name,
            router=self._wiring.router,
            secret_file=self._wiring.secret_file,
            end_within_s=spec.drain_timeout_s + WORKERS_END_S,
        )
        takes = dict(self._resources(role))
        ray.remote(WorkerActor).options(
            name=self._prefix + name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=takes.pop("CPU", 0),
            num_gpus=takes.pop("GPU", 0),
            resources=takes,
        ).remote(order)

    def _drain(self, name: str) -> None:
        actor = _actor(self._prefix + name)
        if actor is None:
            return
        self._request_nodes({other: role for other, role in self._roles.items() if other != name})
        try:
            ray.get(actor.drain.remote(), timeout=self._state_timeout_s)
        except GetTimeoutError:
            if self._ledger(name).life().machine:
                raise
            ray.kill(actor)  # it waits for a node, and no worker has been started

    def _request_nodes(self, roles: Mapping[str, Role]) -> None:
        """Have Ray's autoscaler bring nodes for these workers, in place of those that were asked for before."""
        if self._settings.request_nodes:
            request_resources(bundles=[self._resources(role) for role in roles.values()])

    def _resources(self, role: Role) -> dict[str, float]:
        """Return what a replica takes. An actor gets all of it on one node."""
        number = self._num_devices[role]
        return {name: number * amount for name, amount in self._settings.resources_per_device.items()}

    def _ledger(self, name: str) -> Ledger:
        return Ledger(self._prefix + name, self._settings.namespace)

    @property
    def _state_timeout_s(self) -> float:
        return min(STATE_TIMEOUT_S, self._settings.timeout_s / 2)


def connect(settings: Settings) -> None:
    """Connect this process with Ray, whose nodes get the package from here; its dependencies are there already."""
    ray.init(
        address=settings.address or "auto",
        namespace=settings.namespace,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"py_modules": [str(Path(pdserve.__file__).parent)], "env_vars": PRIORITY},
    )


def _actor(name: str) -> Any:  # noqa: ANN401 - Ray makes the type of a handle when it is called
    """Return an actor's handle; None where there is none of this name."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None
