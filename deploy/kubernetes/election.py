"""Who of several autoscalers acts: the one that holds a Lease.

Invariant: of two processes whose clocks run at about the same rate, one acts only after the other has stopped. The
leader stops acting `RENEW_WITHIN_S` after the beginning of its last successful renewal. Another process takes the Lease
once the Lease has not changed for the duration that it names, which is longer. Each process measures durations on its
own clock; times of different clocks are never compared. client-go's leader election has the same rules and durations.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pdserve.base.clock import Clock
from pdserve.kubernetes.client import ApiError, Client, RefusedError
from pdserve.kubernetes.objects import Lease, LeaseSpec

logger = logging.getLogger(__name__)

API = "coordination.k8s.io/v1"
DURATION_S = 15
RENEW_WITHIN_S = 10.0
RETRY_S = 2.0


class Election:
    """One candidate's view of the Lease. Pure."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._version: str | None = None  # of the Lease; None: it was not seen
        self._seen_s = 0.0  # when it was first seen at this version
        self._duration_s = 0.0
        self._until_s = -math.inf  # until when this process leads
        self.holder = ""  # empty: nobody

    def see(self, lease: Lease, now_s: float) -> None:
        if lease.metadata.resource_version != self._version:
            self._version, self._seen_s = lease.metadata.resource_version, now_s
        self._duration_s = float(lease.spec.lease_duration_seconds or 0)
        self.holder = lease.spec.holder_identity or ""
        if self.holder != self._me:
            self._until_s = now_s

    def may_take(self, now_s: float) -> bool:
        """Return whether this process may write its name into the Lease."""
        return self.holder in ("", self._me) or now_s - self._seen_s >= self._duration_s

    def renewed(self, lease: Lease, began_s: float) -> None:
        """Note that this process wrote the Lease, in a request that began at `began_s`."""
        self.see(lease, began_s)
        self._until_s = began_s + RENEW_WITHIN_S

    def leads_for_s(self, now_s: float) -> float:
        """Return for how long this process may act without another renewal."""
        return max(0.0, self._until_s - now_s)


class Leadership:
    """Does some work whenever this process leads."""

    def __init__(self, client: Client, namespace: str, name: str, me: str, clock: Clock) -> None:
        self._client = client
        self._name = name
        self._path = f"/apis/{API}/namespaces/{namespace}/leases"
        self._me = me
        self._clock = clock
        self._election = Election(me)
        self.leads = False

    @property
    def holder(self) -> str:
        """The leader as of the last look; empty where there is none."""
        return self._election.holder

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event) -> None:
        """Work while this process leads, again each time, until asked to stop or until the work has ended by itself."""
        task: asyncio.Task[None] | None = None
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                task = await self._kept(task)  # the lead may have ended during the wait
                await self._try()
                task = await self._kept(task)
                if self.leads and task is None:
                    task = asyncio.create_task(work())
                waits = {stopping, *([task] if task is not None else [])}
                wait_s = min(RETRY_S, self._election.leads_for_s(self._clock.now_s())) if self.leads else RETRY_S
                await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if task is not None and task.done():
                    return task.result()
            if task is not None:  # it stops too, and while this process still leads
                await asyncio.wait({task}, timeout=self._election.leads_for_s(self._clock.now_s()))
                if task.done():
                    task.result()
        finally:
            stopping.cancel()
            if task is not None:
                await _cancelled(task)
            await self._release()

    async def _kept(self, task: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        """Return the work while this process leads; end it otherwise, and return None."""
        leads = self._election.leads_for_s(self._clock.now_s()) > 0
        if leads != self.leads:
            logger.info("this autoscaler %s", "leads" if leads else f"follows: {self.holder or 'nobody'} leads")
        self.leads = leads
        if leads or task is None:
            return task
        await _cancelled(task)
        if not task.cancelled():
            task.result()
        return None

    async def _try(self) -> None:
        """Read the Lease, and take or renew it where the election allows."""
        began_s = self._clock.now_s()
        left_s = self._election.leads_for_s(began_s)
        try:
            async with asyncio.timeout(min(left_s, 5.0) if left_s else 5.0):
                lease = await self._look()
                if lease is None:
                    return
                self._election.see(lease, self._clock.now_s())
                if self._election.may_take(self._clock.now_s()):
                    self._election.renewed(await self._write(lease, self._me), began_s)
        except RefusedError as error:
            if error.status != 409:  # another one was faster
                logger.warning("the Lease %s: %s", self._name, error)
        except (ApiError, TimeoutError) as error:
            logger.warning("the Lease %s: %s", self._name, error or "no answer")

    async def _look(self) -> Lease | None:
        try:
            return await self._client.get(f"{self._path}/{self._name}", Lease)
        except RefusedError as error:
            if error.status != 404:
                raise
        body = {"apiVersion": API, "kind": "Lease", "metadata": {"name": self._name}, "spec": {}}
        return await self._client.create(self._path, body, Lease)

    async def _write(self, lease: Lease, holder: str) -> Lease:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people; nobody here compares it
        changes = lease.spec.holder_identity != holder
        spec = LeaseSpec(
            holder_identity=holder,
            lease_duration_seconds=DURATION_S if holder else 1,
            acquire_time=now if changes else lease.spec.acquire_time,
            renew_time=now,
            lease_transitions=(lease.spec.lease_transitions or 0) + (changes and bool(holder)),
        )
        body = {"apiVersion": API, "kind": "Lease", "metadata": lease.metadata, "spec": spec}
        return await self._client.replace(f"{self._path}/{self._name}", body, Lease)

    async def _release(self) -> None:
        """Let another one lead at once."""
        if self._election.leads_for_s(self._clock.now_s()) > 0:
            self.leads = False
            with suppress(ApiError, TimeoutError):
                async with asyncio.timeout(2.0):
                    lease = await self._client.get(f"{self._path}/{self._name}", Lease)
                    if lease.spec.holder_identity == self._me:
                        await self._write(lease, "")


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
