"""Real routers with the HTTP door open."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack

import httpx
import openai
import pytest
import uvloop
from http_door import HttpRouter, StartHttp
from router_fakes import StartRouter


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Let tests ask by their marker for the event loop that routers run on."""
    del config
    marker = item.get_closest_marker("asyncio")
    if marker is not None and "loop_factories" in marker.kwargs:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
async def start_http(start_router: StartRouter) -> AsyncIterator[StartHttp]:
    """Start routers; each has to be idle at the test's end."""
    async with AsyncExitStack() as stack:

        async def start(*, pair: bool = True, key: str = "none", **settings: object) -> HttpRouter:
            router = await start_router(http_port=0, **settings)
            if pair:
                await router.pair()
            url = router.addresses.http
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20)
            await stack.enter_async_context(client)
            return HttpRouter(router, http, client)

        yield start
