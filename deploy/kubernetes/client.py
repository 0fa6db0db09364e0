"""A thin client of Kubernetes' API, with the account of the pod that it runs in, or else with KUBECONFIG.

lightkube reads the settings and renews tokens, httpx2 speaks HTTP, and msgspec decodes what is asked for.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self, TypeVar

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig
from lightkube.core.exceptions import ConfigError as SettingsError

from pdserve.errors import CommandError, ConfigError
from pdserve.kubernetes.objects import Object, Pod, PodList, Status

TIMEOUT_S = 10.0  # of a request, without the waits that the API asks for
QUIET_S = 90.0  # without a line of a watch, after which its connection counts as lost: a bookmark comes each minute
WATCH_S = 300  # after which the API ends a watch
PAGE = 250  # objects in a page of a list
MAX_LINE_BYTES = 8 << 20  # of a watch; etcd keeps no object above 1.5 MiB
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 30.0

T = TypeVar("T", bound=Object)

logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it writes a line for each request


class ApiError(CommandError):
    """The API refused a request, or nobody knows what became of it."""


class UnreachableError(ApiError):
    """No answer came, or none that can be read. What was asked for may have been done."""


class RefusedError(ApiError):
    """The API has answered, with an error. `status` is HTTP's."""

    def __init__(self, status: int, text: str, wait_s: float | None = None) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.wait_s = wait_s  # before the request may be made again


class Backoff:
    """Waits longer each time, until it is reset."""

    def __init__(self) -> None:
        self._wait_s = FIRST_WAIT_S

    def reset(self) -> None:
        self._wait_s = FIRST_WAIT_S

    async def wait(self, error: ApiError | None = None) -> None:
        """Wait as long as the API asked for, or else twice as long as the last time."""
        asked_s = error.wait_s if isinstance(error, RefusedError) else None
        await asyncio.sleep(self._wait_s * random.uniform(0.8, 1.2) if asked_s is None else min(asked_s, MAX_WAIT_S))
        self._wait_s = min(MAX_WAIT_S, 2 * self._wait_s)


class Client:
    """A connection to the API. Calls raise ApiError; callers limit their time."""

    def __init__(self) -> None:
        """ConfigError where this process has no account, and no usable KUBECONFIG."""
        try:
            config = KubeConfig.from_env().get()
            assert config is not None  # without a default, it raises
            self._http = AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(TIMEOUT_S)))
        except (SettingsError, OSError, KeyError, ValueError) as error:
            raise ConfigError(f"Kubernetes: neither a service account nor a usable KUBECONFIG: {error}") from error
        self.namespace = config.namespace

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        return decoded(await self._ask("GET", path), kind)

    async def pods(self, path: str, selector: str = "") -> tuple[list[Pod], str]:
        """Return all pods as the API has them now, and the version of that list."""
        found: list[Pod] = []
        params = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            page = decoded(await self._ask("GET", path, params=params), PodList)
            found += page.items
            if not page.metadata.continue_:
                return found, page.metadata.resource_version
            params["continue"] = page.metadata.continue_

    async def create(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        return decoded(await self._ask("POST", path, body), kind)

    async def replace(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        """Replace an object of the version that `body` names, and return it; 409 where it has another one."""
        return decoded(await self._ask("PUT", path, body), kind)

    async def patch(self, path: str, body: Mapping[str, Any]) -> None:
        """Change the fields that `body` has; a field that is None is removed."""
        await self._ask("PATCH", path, body, content_type="application/merge-patch+json")

    async def changes(self, path: str, version: str) -> AsyncIterator[bytes]:
        """Yield each line of a watch that begins at a version of a list, until it ends."""
        params = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        params["resourceVersion"] = version
        timeout = httpx2.Timeout(TIMEOUT_S, read=QUIET_S)
        try:
            async with self._http.stream("GET", path, params=params, timeout=timeout) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise _refusal(response)
                rest = b""
                async for part in response.aiter_bytes():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        yield line
                    if len(rest) > MAX_LINE_BYTES:
                        raise UnreachableError(f"{path}: a watch sent a line of more than {MAX_LINE_BYTES} bytes")
        except (httpx2.HTTPError, OSError) as error:
            raise UnreachableError(f"{path}: {_in_words(error)}") from error

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """Make a request. It is repeated while the API is too busy (429), and a GET also while the API fails (5xx)."""
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": content_type}
        backoff = Backoff()
        while True:
            try:
                response = await self._http.request(method, path, params=params, content=content, headers=headers)
            except (httpx2.HTTPError, OSError) as error:
                raise UnreachableError(f"{method} {path}: {_in_words(error)}") from error
            if response.status_code < 400:
                return response.content
            refusal = _refusal(response)
            if refusal.status != 429 and (method != "GET" or refusal.status < 500):
                raise refusal
            await backoff.wait(refusal)


def decoded(text: bytes, kind: type[T]) -> T:
    """Return an object from JSON; UnreachableError where it is none."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise UnreachableError(f"the API answered something else: {error}") from error


def _refusal(response: httpx2.Response) -> RefusedError:
    try:
        text = msgspec.json.decode(response.content, type=Status).message
    except msgspec.MsgspecError:
        text = response.reason_phrase
    wait = response.headers.get("Retry-After", "")
    return RefusedError(response.status_code, text[:500], float(wait) if wait.isdecimal() else None)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}"
