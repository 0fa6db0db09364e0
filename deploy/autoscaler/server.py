"""The autoscaler's process. It ends at once at a signal: what it ordered goes on, and its successor sees it."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.autoscaler.actuator import Actuator
from pdserve.autoscaler.actuators import ProcessActuator
from pdserve.autoscaler.actuators import PublishActuator as PublishSettings
from pdserve.autoscaler.journal import Journal
from pdserve.autoscaler.loop import Cluster, Loop, PolicyFile, WarmUp
from pdserve.autoscaler.observation import State
from pdserve.autoscaler.process import LocalActuator
from pdserve.autoscaler.publish import PublishActuator
from pdserve.autoscaler.schema import Policy
from pdserve.clock import MonotonicClock
from pdserve.config import ProcessConfig
from pdserve.errors import CommandError, ConfigError
from pdserve.launch.admin import AdminClient
from pdserve.launch.folder import read_state
from pdserve.launch.launcher import LauncherClient
from pdserve.metrics import DECISIONS, DESIRED, REPLICAS, Sample
from pdserve.metrics_server import showing
from pdserve.roles import Role


@dataclass(frozen=True, slots=True)
class Target:
    """Where a cluster is reached."""

    routers: tuple[str, ...]  # internal ports, host:port
    secret_file: Path
    launcher: str = ""  # host:port of its launcher, where it has one
    record_file: Path | None = None  # where decisions are written for other commands
    name: str = ""  # of a cluster of this machine

    def check(self) -> None:
        """Raise where the cluster has ended: ConfigError, or CommandError where another one has its name."""
        if self.name and read_state(self.name).launcher != self.launcher:
            raise CommandError(f"the cluster named {self.name!r} has been started again")


async def serve(policy_file: Path, target: Target, config: ProcessConfig, warm_up: WarmUp) -> None:
    """Scale a cluster until it ends. ConfigError where the policy is not valid, or cannot be followed there."""
    file = PolicyFile(policy_file, warm_up)
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(AdminClient(address, target.secret_file)) for address in target.routers
        ]
        actuator = await stack.enter_async_context(connected(file.policy, target, routers))
        journal = Journal(target.record_file, policy_file)
        cluster = Cluster(actuator, [router.status for router in routers], target.check)
        loop = Loop(file, cluster, journal, MonotonicClock())
        journal.metrics_address = await stack.enter_async_context(showing(config, lambda: samples(loop, actuator)))
        await loop.run()


@asynccontextmanager
async def connected(policy: Policy, target: Target, routers: Sequence[AdminClient]) -> AsyncIterator[Actuator]:
    """Be connected with what a policy's actuator orders from, for the length of the block."""
    match policy.actuator:
        case ProcessActuator(timeout_s=timeout_s):
            if not target.launcher:
                raise ConfigError("actuator: no launcher is known: this cluster was not started by `pdserve up`")
            async with LauncherClient(target.launcher, target.secret_file) as launcher:
                yield LocalActuator(launcher, routers[0], timeout_s)
        case PublishSettings():
            yield PublishActuator(routers[0])
        case other:
            raise ConfigError(f"actuator.kind: {other.kind} cannot be followed by this version")


def samples(loop: Loop, actuator: Actuator) -> Iterator[Sample]:
    """Yield what an autoscaler shows of itself. An actuator that publishes sizes has them already, step by step."""
    sizes = {decision.pool: decision.desired for decision in loop.decisions}
    if isinstance(actuator, PublishActuator) and not any(decision.advisory for decision in loop.decisions):
        sizes |= actuator.sizes
    for pool, size in sizes.items():
        yield Sample(DESIRED, size, (pool,))
    if loop.observation is not None:
        replicas = loop.observation.replicas
        for role in Role:
            for state in State:
                count = sum(each.role is role and each.state is state for each in replicas)
                yield Sample(REPLICAS, count, (role, state.value))
    for labels, number in loop.num_decided.items():
        yield Sample(DECISIONS, number, labels)
