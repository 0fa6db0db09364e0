"""Real routers in this process, each of which has to be idle at its test's end."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from router_fakes import TEMPLATE, RouterUnderTest, StartRouter, running_router

from pdserve.checkpoint.checkpoint import NO_DEFAULTS, GenerationDefaults
from pdserve.launch.folder import write_secret


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    return write_secret(tmp_path)


@pytest.fixture
async def start_router(secret_file: Path) -> AsyncIterator[StartRouter]:
    """Start routers with the given settings; each has to be idle at the test's end."""
    async with AsyncExitStack() as stack:
        started: list[RouterUnderTest] = []

        async def start(
            *,
            template: str | None = TEMPLATE,
            defaults: GenerationDefaults = NO_DEFAULTS,
            archived: Callable[[], bytes] | None = None,
            **settings: object,
        ) -> RouterUnderTest:
            running = running_router(secret_file, settings, template=template, defaults=defaults, archived=archived)
            router = await stack.enter_async_context(running)
            started.append(router)
            return router

        yield start
        for router in started:
            if not router.stop.is_set():
                await router.until_idle()
