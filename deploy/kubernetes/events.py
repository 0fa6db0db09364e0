"""Events on objects of Kubernetes, so that `kubectl describe` shows what was decided and why.

They are for people to read. A burst of 20 is sent at once, then one event every 5 s. When more are waiting, the oldest
are dropped. Events that the API refuses are dropped too.
"""

import asyncio
import logging
from collections import deque
from datetime import UTC, datetime
from uuid import uuid4

from pdserve.kubernetes.client import ApiError, Client
from pdserve.kubernetes.objects import Anything, Object

logger = logging.getLogger(__name__)

BURST, EVERY_S = 20, 5.0
SEND_S = 10.0
MAX_NOTE = 1024  # characters that the API takes


class Subject(Object, frozen=True):
    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str = ""


class Events:
    def __init__(self, client: Client, component: str, instance: str) -> None:
        self._client = client
        self._component = component
        self._instance = instance
        self._waiting: deque[tuple[Subject, str, str, bool]] = deque(maxlen=BURST)
        self._news = asyncio.Event()

    def report(self, subject: Subject, reason: str, note: str, *, is_warning: bool = False) -> None:
        """Have an event sent. `reason`: one word in CamelCase."""
        self._waiting.append((subject, reason, note, is_warning))
        self._news.set()

    async def run(self) -> None:
        """Go on until cancelled."""
        allowed, loop = float(BURST), asyncio.get_running_loop()
        counted_s = loop.time()
        while True:
            self._news.clear()
            now_s = loop.time()
            allowed, counted_s = min(float(BURST), allowed + (now_s - counted_s) / EVERY_S), now_s
            while self._waiting and allowed >= 1:
                allowed -= 1
                await self._send(*self._waiting.popleft())
            if self._waiting:
                await asyncio.sleep((1 - allowed) * EVERY_S)
            else:
                await self._news.wait()

    async def _send(self, subject: Subject, reason: str, note: str, is_warning: bool) -> None:
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{subject.name}.{uuid4().hex[:16]}", "namespace": subject.namespace},
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": self._component,
            "reportingInstance": self._instance[:128],
            "action": reason,
            "reason": reason,
            "type": "Warning" if is_warning else "Normal",
            "note": note[:MAX_NOTE],
            "regarding": subject,
        }
        try:
            async with asyncio.timeout(SEND_S):
                path = f"/apis/events.k8s.io/v1/namespaces/{subject.namespace}/events"
                await self._client.create(path, body, Anything)
        except (ApiError, TimeoutError) as error:
            logger.warning("an event of %s was not sent: %s", subject.name, error or "no answer")
