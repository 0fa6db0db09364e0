"""A policy as a custom resource of Kubernetes: its document, and its status.

The resource's `spec` is a policy without `apiVersion` and `kind`. It is kept in a file, which is read again as any
policy's is.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pdserve.autoscaler.decisions import Decision
from pdserve.autoscaler.loop import Loop
from pdserve.base.errors import ConfigError
from pdserve.base.files import write_atomically
from pdserve.kubernetes.client import ApiError, Client
from pdserve.kubernetes.objects import GROUP, KIND, PLURAL, VERSION, Metadata, Object
from pdserve.kubernetes.watcher import Troubles

LOOK_S = 5.0
CALL_S = 10.0
TROUBLE = "the policy's resource"  # what a logged error is about


class _Resource(Object, frozen=True):
    metadata: Metadata
    spec: dict[str, Any]


class PolicyResource:
    """One resource, and the file that holds its policy."""

    def __init__(self, client: Client, reference: str, folder: Path) -> None:
        """`reference`: namespace/name."""
        namespace, _, name = reference.partition("/")
        self.file = folder / f"{name}.json"
        self._client = client
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}/{name}"
        self._troubles = Troubles()
        self._generation = 0
        self._shown: dict[str, Any] = {}
        self._since: dict[str, str] = {}  # when the condition became what it is, by its status

    @classmethod
    @asynccontextmanager
    async def opened(cls, reference: str) -> AsyncIterator[Self]:
        """Have the policy in a file for the length of the block; ConfigError where there is no such resource."""
        async with Client.connected() as client:
            with tempfile.TemporaryDirectory(prefix="pdserve-policy-") as folder:
                resource = cls(client, reference, Path(folder))
                try:
                    await resource._fetch()
                except (ApiError, TimeoutError) as error:
                    raise ConfigError(f"policy_resource: {reference}: {error or 'no answer'}") from error
                yield resource

    async def _fetch(self) -> None:
        async with asyncio.timeout(CALL_S):
            found = await self._client.get(self._path, _Resource)
        document = {"apiVersion": "pdserve/v1alpha1", "kind": KIND, **found.spec}
        self._generation = found.metadata.generation
        text = json.dumps(document, indent=1) + "\n"
        if not self.file.exists() or self.file.read_text(encoding="utf-8") != text:
            write_atomically(self.file, text)

    @asynccontextmanager
    async def followed(self, loop: Loop, leads: Callable[[], bool]) -> AsyncIterator[None]:
        """Keep the file as the resource is, and its status as the autoscaler's, for the length of the block."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._follow(loop, leads))
            yield
            task.cancel()

    async def _follow(self, loop: Loop, leads: Callable[[], bool]) -> None:
        while True:
            with self._troubles.logged(TROUBLE):
                await self._fetch()
                if leads():
                    await self.show(loop.file.problem, loop.decisions, loop.last_orders)
                else:
                    self._shown = {}  # another one may write the status
            await asyncio.sleep(LOOK_S)

    async def refuse(self, problem: str) -> None:
        """Show that the policy is refused, as far as the API takes it."""
        with self._troubles.logged(TROUBLE):
            await self.show(problem)

    async def show(self, problem: str, decisions: tuple[Decision, ...] = (), last_orders: str = "") -> None:
        """Write the status, where it is another one. `problem`: with the policy; empty where it is valid.

        `last_orders`: and why they were given; empty before the first ones.
        """
        status = "False" if problem else "True"
        if status not in self._since:
            self._since = {status: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        condition = {
            "type": "Valid",
            "status": status,
            "reason": "Refused" if problem else "Followed",
            "message": problem[:1024],
            "lastTransitionTime": self._since[status],
        }
        shown: dict[str, Any] = {"observedGeneration": self._generation, "conditions": [condition]}
        for each in decisions:
            shown[each.pool.value] = {"replicas": each.num_replicas, "desired": each.desired, "binds": str(each.binds)}
        if last_orders:
            shown["lastDecision"] = last_orders
        if shown != {key: self._shown.get(key) for key in shown}:
            async with asyncio.timeout(CALL_S):
                await self._client.patch(f"{self._path}/status", {"status": shown})
            self._shown |= shown
