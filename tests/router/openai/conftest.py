"""Real routers with the HTTP door open."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import openai
import pytest
from http_door import HttpRouter, StartHttp
from router_fakes import StartRouter


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
