"""A real router with its HTTP door open, and clients of it."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
from router_fakes import RouterUnderTest

StartHttp = Callable[..., Awaitable["HttpRouter"]]


class HttpRouter:
    """A router, and what speaks HTTP to it."""

    def __init__(self, router: RouterUnderTest, http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
        self.router = router
        self.http = http
        self.client = client

    @property
    def port(self) -> int:
        return int(self.router.addresses.http.rpartition(":")[2])

    async def post(self, path: str, **body: Any) -> httpx.Response:  # noqa: ANN401
        return await self.http.post(path, json=body)
