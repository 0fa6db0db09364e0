"""The autoscaler's process. A signal ends it after its present step: what it ordered goes on; a successor sees it."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.autoscaler.actuator import Actuator, LocalActuator, PublishActuator
from pdserve.autoscaler.decisions import ActuatorError
from pdserve.autoscaler.journal import Journal
from pdserve.autoscaler.loop import Loop, PolicyFile, Target, WarmUp
from pdserve.autoscaler.observation import State
from pdserve.autoscaler.schema import Actuator as Settings
from pdserve.autoscaler.schema import KubernetesActuator, Policy, ProcessActuator, RayActuator, load
from pdserve.autoscaler.schema import PublishActuator as PublishSettings
from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import ConfigError, not_installed
from pdserve.base.roles import Role
from pdserve.base.signals import drain_on_signals
from pdserve.net.health import answering
from pdserve.net.operator_client import AdminClient, LauncherClient
from pdserve.observe.metrics import DECISIONS, DESIRED, LEADS, REPLICAS, Sample
from pdserve.observe.metrics_server import showing
from pdserve.settings.autoscaler import AutoscalerConfig

if TYPE_CHECKING:
    from pdserve.autoscaler.kubernetes import InCluster
    from pdserve.autoscaler.resource import PolicyResource

logger = logging.getLogger(__name__)

END_CHECK_S = 0.5  # between two looks at replicas that end
MOST_UNSEEN = 20  # looks in turn without an answer


async def serve(config: AutoscalerConfig, target: Target, warm_up: WarmUp) -> None:
    """Scale a cluster until it ends, or a signal comes.

    ConfigError where the policy is not valid, or cannot be followed there.
    """
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        path, resource = await stack.enter_async_context(_policy(config))
        try:
            file = PolicyFile(path, warm_up)
        except ConfigError as error:
            if resource is not None:
                await resource.refuse(str(error))
            raise
        stack.enter_context(drain_on_signals(asyncio.get_running_loop(), stop.set, config.drain_timeout_s))
        actuator = await stack.enter_async_context(connected(file.policy, target))
        journal = Journal(target.record_file, path)
        beside = await stack.enter_async_context(_beside(file.policy.actuator, actuator, target))
        announce = (lambda *_: None) if beside is None else beside.announce
        loop = Loop(file, target, actuator, journal, MonotonicClock(), announce)
        health = await stack.enter_async_context(answering(config))
        journal.metrics_address = await stack.enter_async_context(
            showing(config, lambda: samples(loop, actuator, beside), target.router.credentials.identity)
        )
        if resource is not None:
            await stack.enter_async_context(resource.followed(loop, lambda: beside is None or beside.leads))
        health.start(lambda: not stop.is_set())
        await (loop.run(stop) if beside is None else beside.run(lambda: loop.run(stop), stop))


@asynccontextmanager
async def _policy(config: AutoscalerConfig) -> "AsyncIterator[tuple[Path, PolicyResource | None]]":
    """Yield the policy's file, and the resource that it is a copy of, if there is one."""
    if config.policy is not None:
        yield config.policy, None
        return
    assert config.policy_resource is not None  # one of both is set
    async with opened_resource(config.policy_resource) as resource:
        yield resource.file, resource


def opened_resource(reference: str) -> "AbstractAsyncContextManager[PolicyResource]":
    """Have the policy that Kubernetes holds, namespace/name, in a file for the length of a block."""
    try:
        from pdserve.autoscaler.resource import PolicyResource  # noqa: PLC0415 - Kubernetes' client is an extra
    except ModuleNotFoundError as error:
        raise not_installed("kubernetes") from error
    return PolicyResource.opened(reference)


@asynccontextmanager
async def connected(policy: Policy, target: Target) -> AsyncIterator[Actuator]:
    """Yield a policy's actuator, which is connected for the length of the block."""
    router = target.router  # any of those that the name leads to
    match policy.actuator:
        case ProcessActuator(timeout_s=timeout_s):
            if not target.launcher:
                raise ConfigError("actuator: no launcher is known: this cluster was not started by `pdserve up`")
            launcher = LauncherClient(target.launcher, target.secret_file, target.identity_dir)
            yield LocalActuator(launcher, router, timeout_s)
        case PublishSettings():
            yield PublishActuator(router)
        case RayActuator():
            async with _on_ray(policy, policy.actuator, target, router) as actuator:
                yield actuator
        case KubernetesActuator():
            from pdserve.autoscaler.kubernetes import PodActuator  # noqa: PLC0415 - its client is an extra
            from pdserve.kubernetes.client import Client  # noqa: PLC0415

            async with Client.connected() as client:
                yield PodActuator(client, router, policy.actuator)


@asynccontextmanager
async def _on_ray(
    policy: Policy, settings: RayActuator, target: Target, router: AdminClient
) -> AsyncIterator[Actuator]:
    if target.elsewhere is None:
        raise ConfigError("actuator.kind: ray: this cluster was not started by `pdserve up --on ray`")
    from pdserve.autoscaler.ray import ActorActuator  # noqa: PLC0415 - Ray is an extra

    devices = {role: policy.pools.of(role).devices_per_replica for role in Role}
    async with ActorActuator.connected(target.elsewhere, router, settings, devices) as actuator:
        yield actuator


@asynccontextmanager
async def _beside(settings: Settings, actuator: Actuator, target: Target) -> "AsyncIterator[InCluster | None]":
    """Yield what an autoscaler does on Kubernetes beside its loop; None where it does not run there."""
    of_pods = settings if isinstance(settings, KubernetesActuator) else None
    publishes_there = settings.kind == "publish" and "KUBERNETES_SERVICE_HOST" in os.environ
    if of_pods is None and not publishes_there:
        yield None
        return
    async with AsyncExitStack() as stack:
        try:
            from pdserve.autoscaler.kubernetes import InCluster  # noqa: PLC0415 - Kubernetes' client is an extra
            from pdserve.kubernetes.client import Client  # noqa: PLC0415

            client = await stack.enter_async_context(Client.connected())
        except (ModuleNotFoundError, ConfigError) as error:
            if of_pods is not None:
                raise
            logger.warning("pods are not watched, and ends of processes not reported: %s", error)
            yield None
        else:
            yield InCluster(client, actuator, of_pods, target.clients, MonotonicClock())


async def end_all(policy_file: Path, target: Target) -> None:
    """Let all replicas of a cluster drain and end, and wait until they have. ActuatorError: none is reached."""
    async with connected(load(policy_file), target) as all_:
        await end_replicas(all_)


async def end_replicas(all_: Actuator) -> None:
    """Ask all replicas to drain until none is left. A replica for which the order failed is asked again.

    ActuatorError: nobody says what there is, MOST_UNSEEN times in turn.
    """
    unseen = 0
    while True:
        try:
            listed = await all_.observe()
        except ActuatorError as error:
            unseen += 1
            if unseen == MOST_UNSEEN:
                raise
            logger.warning("%s", error)
        else:
            if not listed:
                return
            unseen = 0
            for replica in listed:
                if replica.state is not State.DRAINING:
                    try:
                        await all_.drain(replica.name)
                    except ActuatorError as error:  # the order is given again
                        logger.warning("%s", error)
        await asyncio.sleep(END_CHECK_S)


def samples(loop: Loop, actuator: Actuator, beside: "InCluster | None" = None) -> Iterator[Sample]:
    """Yield what an autoscaler shows of itself; one that follows another shows no sizes.

    An actuator that publishes sizes has them already, step by step.
    """
    leads = beside is None or beside.leads
    yield Sample(LEADS, leads)
    if beside is not None:
        yield from beside.watcher.samples()
    sizes = {decision.pool: decision.desired for decision in loop.decisions} if leads else {}
    if isinstance(actuator, PublishActuator) and not any(decision.advisory for decision in loop.decisions):
        sizes |= actuator.sizes
    for pool, size in sizes.items():
        yield Sample(DESIRED, size, (pool,))
    if leads and loop.observation is not None:
        replicas = loop.observation.replicas
        for role in Role:
            for state in State:
                count = sum(each.role is role and each.state is state for each in replicas)
                yield Sample(REPLICAS, count, (role, state.value))
    for labels, number in loop.num_decided.items():
        yield Sample(DECISIONS, number, labels)
