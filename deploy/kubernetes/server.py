"""The process of a watcher of pods, for clusters that nothing scales."""

import asyncio
from contextlib import AsyncExitStack

from pdserve.clock import MonotonicClock
from pdserve.health import answering
from pdserve.kubernetes.client import Client
from pdserve.kubernetes.config import WatcherConfig
from pdserve.kubernetes.watcher import PodWatcher
from pdserve.launch.admin import AdminClient
from pdserve.metrics_server import showing
from pdserve.names import addresses_of, check_names
from pdserve.signals import drain_on_signals


async def serve(config: WatcherConfig) -> None:
    """Watch until a signal comes. ConfigError where a router's name is none, or this process has no account."""
    stop = asyncio.Event()
    check_names(config.routers, "routers")
    first = AdminClient(config.routers[0], config.secret_file, config.identity_dir)  # reads its files once for all

    async def routers() -> list[AdminClient]:
        return [first.at(address) for address in await addresses_of(config.routers)]

    async with AsyncExitStack() as stack:
        stack.enter_context(drain_on_signals(asyncio.get_running_loop(), stop.set, config.drain_timeout_s))
        client = await stack.enter_async_context(Client())
        watcher = PodWatcher(client, client.namespace, routers, MonotonicClock())
        health = await stack.enter_async_context(answering(config))
        await stack.enter_async_context(showing(config, watcher.samples, first.credentials.identity))
        health.start(lambda: not stop.is_set())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watcher.run())
            await stop.wait()
            task.cancel()
