"""A thin client of Kubernetes' API, with the account of the pod that it runs in, or else with KUBECONFIG.

Kubernetes' own client reads the settings, renews credentials and speaks HTTP; msgspec decodes what is asked for.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import yaml
from aiohttp import ClientError, ClientResponse, ClientTimeout
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.incluster_config import SERVICE_TOKEN_FILENAME
from kubernetes.aio.config.kube_config import KubeConfigLoader, KubeConfigMerger

from pdserve.base.errors import CommandError, ConfigError
from pdserve.kubernetes.objects import Object, Pod, PodList, Status

TIMEOUT_S = 10.0  # until a connection is there, and between two parts of an answer
REPEAT_S = 4.0  # in which a request is repeated; less than callers wait, so that they get the API's last answer
QUIET_S = 90.0  # without a line of a watch, after which its connection counts as lost: a bookmark comes each minute
WATCH_S = 300  # after which the API ends a watch
RENEW_S = 60.0  # between two looks at the credentials of a KUBECONFIG
PAGE = 250  # objects in a page of a list
MAX_LINE_BYTES = 8 << 20  # of a watch; etcd keeps no object above 1.5 MiB
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 30.0

MERGE = "application/merge-patch+json"

FAILURES = (ClientError, HttpProcessingError, ConfigException, OSError, ValueError)  # of a request

T = TypeVar("T", bound=Object)


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

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    @asynccontextmanager
    async def connected(cls) -> AsyncIterator[Self]:
        """Have a client for the length of the block.

        ConfigError where this process has no account, and no usable KUBECONFIG.
        """
        settings = Configuration()
        try:
            namespace = await _load(settings)
            api = ApiClient(settings)
        except (ConfigException, OSError, LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
            raise ConfigError(f"Kubernetes: neither a service account nor a usable KUBECONFIG: {error}") from error
        async with api:
            yield cls(api, namespace)

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
        await self._ask("PATCH", path, body)

    async def changes(self, path: str, version: str) -> AsyncGenerator[bytes, None]:
        """Yield each line of a watch that begins at a version of a list, until it ends."""
        params = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        async with self._answer("GET", path, params=params | {"resourceVersion": version}, quiet_s=QUIET_S) as answer:
            while (line := await answer.content.readline(max_line_length=MAX_LINE_BYTES)).endswith(b"\n"):
                yield line

    async def _ask(self, method: str, path: str, body: object = None, params: Mapping[str, str] | None = None) -> bytes:
        """Make a request.

        For REPEAT_S it is repeated while the API is too busy (429), and a GET also while the API fails (5xx).
        """
        backoff, last_s = Backoff(), time.monotonic() + REPEAT_S
        while True:
            try:
                async with self._answer(method, path, body, params) as answer:
                    return await answer.read()
            except RefusedError as refusal:
                may_repeat = refusal.status == 429 or (method == "GET" and refusal.status >= 500)
                if not may_repeat or time.monotonic() + (refusal.wait_s or 0.0) >= last_s:
                    raise
                await backoff.wait(refusal)

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: object = None,
        params: Mapping[str, str] | None = None,
        quiet_s: float = TIMEOUT_S,
    ) -> AsyncIterator[ClientResponse]:
        """Make a request once, and read its answer in the block. `quiet_s`: between two parts of it."""
        headers = {"Accept": "application/json"} | ({"Content-Type": MERGE} if method == "PATCH" else {})
        try:
            request = await self._api.param_serialize(
                method,
                path,
                query_params=dict(params or {}),
                header_params=headers,
                body=msgspec.to_builtins(body),
                auth_settings=["BearerToken"],
            )
            limits = ClientTimeout(sock_connect=TIMEOUT_S, sock_read=quiet_s)
            async with (await self._api.call_api(*request, _request_timeout=limits)).response as answer:
                if answer.status >= 400:
                    raise _refusal(answer, await answer.read())
                yield answer
        except FAILURES as error:
            raise UnreachableError(f"{method} {path}: {_in_words(error)}") from error


async def _load(settings: Configuration) -> str:
    """Read the account of this process's pod, or else KUBECONFIG; return the namespace that it names."""
    if (token := Path(SERVICE_TOKEN_FILENAME)).exists():
        load_incluster_config(settings)  # the token is read again each minute
        return token.with_name("namespace").read_text(encoding="utf-8")
    file = os.environ.get("KUBECONFIG", "~/.kube/config")
    loader = KubeConfigLoader(KubeConfigMerger(file).config, config_base_path=None)
    next_s = 0.0

    async def renew(settings: Configuration) -> None:
        """Load the settings the first time, and later what has become of the credentials."""
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + RENEW_S
            await loader.load_and_set(settings)
            settings.api_key = {name: key.strip() for name, key in settings.api_key.items()}  # a file ends in a newline

    await renew(settings)
    if settings.host.startswith("https") and not settings.api_key and not settings.cert_file:
        raise ConfigException(f"{file}: its user has no credentials")
    settings.refresh_api_key_hook = renew
    return loader.current_context["context"].get("namespace") or "default"


def decoded(text: bytes, kind: type[T]) -> T:
    """Return an object from JSON; UnreachableError where it is none."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise UnreachableError(f"the API answered something else: {error}") from error


def _refusal(answer: ClientResponse, content: bytes) -> RefusedError:
    try:
        text = msgspec.json.decode(content, type=Status).message
    except msgspec.MsgspecError:
        text = answer.reason or ""
    wait = answer.headers.get("Retry-After", "")
    return RefusedError(answer.status, text[:500], float(wait) if wait.isdecimal() else None)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}"
