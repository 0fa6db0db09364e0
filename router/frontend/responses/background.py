"""Responses that are computed while no client waits.

Invariant: a response that was begun in the background ends once in the store: with its answer, cancelled, or failed. At
most `max_num` of a model are computed at once. The events of one that is streamed are kept until it has ended, and
after that as long as MAX_LOG_BYTES hold them and later ones.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.frontend.answer import Answer, Gain, Outcome
from pdserve.router.frontend.intake import Intake, Preparing
from pdserve.router.frontend.models import Models
from pdserve.router.frontend.openai.dialect import Choice, ledger_of
from pdserve.router.frontend.responses.event_log import EventLog
from pdserve.router.frontend.responses.events import Json
from pdserve.router.frontend.responses.keeping import Keeping
from pdserve.router.requests.commands import Finished

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 32 << 20  # of events of responses that have ended
RETRY_S = (0.2, 1.0, 5.0)  # waits before the end of a response is kept again, where the store failed
GRACE_S = 60.0  # after a request's deadline, until its response counts as lost with its process
_CANCELLED = Refused(Cause.CANCELLED, "the response was cancelled")
_STOPPING = Refused(Cause.SHUTTING_DOWN, "this process shuts down")


class Job:
    """One response: the `Sink` of its answer."""

    def __init__(self, intake: Intake, keeping: Keeping, choice: Choice, log: EventLog | None) -> None:
        """`intake`: of its model. `log` gets the events; None: nobody wants them."""
        self.intake = intake
        self.log = log
        self.response = keeping.response
        self.keeping = keeping
        self.answer: Answer | None = None
        self.outcome: Outcome | None = None
        self.begun = asyncio.Event()  # something was gained, or it has ended
        self.ended = asyncio.Event()
        self._choice = choice

    @property
    def name(self) -> tuple[str, str]:
        return self.keeping.tenant, self.response.id

    def write(self, gains: Sequence[Gain], outcome: Outcome | None) -> bool:
        if self.outcome is None:
            for gain in gains:
                self.tell(self.response.gained(self._choice, gain))
            self.begun.set()
            if outcome is not None:
                self.end(outcome)
        return True

    def cut_off(self, outcome: Refused) -> None:
        self.end(outcome)

    def end(self, outcome: Outcome) -> None:
        """Note how it ends, unless it has ended."""
        if self.outcome is None:
            self.outcome = outcome
            self.begun.set()
            self.ended.set()

    def tell(self, events: Sequence[Json], *, is_last: bool = False) -> None:
        """Let readers have events."""
        if self.log is not None:
            self.log.add(events, is_last=is_last)

    def finish(self) -> list[Json]:
        """Make the response what it is to be; return its last events."""
        assert self.answer is not None
        if isinstance(self.outcome, Finished):
            events = self.response.closed(self._choice)
            self.response.finish([self.outcome.usage], ledger_of(self.answer.hex_id, self.outcome.ledger))
            return [*events, self.response.ended()]
        assert self.outcome is not None
        return self.response.broken(self.outcome)


class Background:
    """The jobs of this process. Leaving the `async with` block ends those that are left."""

    def __init__(self, models: Models, max_num: int, max_deadline_s: float) -> None:
        """`max_num`: of a model."""
        self._models = models
        self._max_num = max_num
        self._running_s = max_deadline_s + GRACE_S
        self._jobs: dict[tuple[str, str], Job] = {}  # by tenant and response
        self._starting: Counter[Intake] = Counter()
        self._logs: dict[tuple[str, str], EventLog] = {}  # of responses that have ended, the oldest first
        self._tasks = asyncio.TaskGroup()
        for intake in models:
            intake.backend.aborts.append(self._abort)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for intake in self._models:
            intake.backend.aborts.remove(self._abort)
        for job in self._jobs.values():
            job.end(_STOPPING)
        await self._tasks.__aexit__(kind, error, trace)

    async def start(
        self, job: Job, request: inference.GenerateRequest, key: bytes | None, received_s: float, preparing: Preparing
    ) -> tuple[Answer, Json]:
        """Begin a response; return its answer, and what the client is told of it.

        RefusedError if it is not valid, or too many are computed.
        """
        intake = job.intake
        if sum(each.intake is intake for each in self._jobs.values()) + self._starting[intake] >= self._max_num:
            text = f"background: {self._max_num} responses are computed in the background, the limit"
            raise RefusedError(Refused(Cause.BACKGROUND, text))
        self._starting[intake] += 1
        told = dict(job.response.told)
        job.tell(job.response.queued())
        try:
            job.answer = await intake.accept(request, job, key, received_s=received_s, preparing=preparing)
            try:
                await job.keeping.begin(told, self._running_s)
            except BaseException:
                intake.leave(job.answer)
                raise
        finally:
            self._starting[intake] -= 1
        self._jobs[job.name] = job
        self._count()
        self._tasks.create_task(self._run(job), name=f"response {job.response.id}")
        return job.answer, told

    def log(self, tenant: str, name: str) -> EventLog | None:
        """Return the events of a response; None if they are not kept, or no more."""
        job = self._jobs.get((tenant, name))
        return self._logs.get((tenant, name)) if job is None else job.log

    def cancel(self, tenant: str, name: str) -> None:
        """Let a response be computed no further, whichever process does so. The store says what became of it."""
        self._abort(tenant, (name,))
        for intake in self._models:  # whose routers tell all frontends; it may be any model's response
            intake.backend.abort(tenant, (name,))

    def _abort(self, tenant: str, names: Sequence[str]) -> None:
        for name in names:
            self._logs.pop((tenant, name), None)
            if (job := self._jobs.get((tenant, name))) is not None:
                job.end(_CANCELLED)

    async def _run(self, job: Job) -> None:
        try:
            await job.begun.wait()
            if job.outcome is None:
                with suppress(RefusedError):  # the store has logged it; the answer goes on
                    await job.keeping.go_on()
            await job.ended.wait()
            events = job.finish()
            await self._end(job)
            job.tell(events, is_last=True)
            self._keep(job)
        finally:
            del self._jobs[job.name]
            self._count()
            if job.answer is not None:
                job.intake.leave(job.answer)

    async def _end(self, job: Job) -> None:
        """Keep the end of a response, at the last of several tries if the store fails."""
        for wait_s in (*RETRY_S, None):
            try:
                return await job.keeping.end()
            except RefusedError as error:
                if wait_s is None:
                    logger.error("response %s has no end in the store: %s", job.response.id, error.refused.message)
                    return None
                await asyncio.sleep(wait_s)
        return None

    def _count(self) -> None:
        self._models.first.backend.kept.num_in_background = len(self._jobs)

    def _keep(self, job: Job) -> None:
        """Keep the events of a response that has ended, and forget the oldest beyond the limit."""
        if job.log is None or isinstance(job.outcome, Refused):
            return
        self._logs[job.name] = job.log
        while sum(log.num_bytes for log in self._logs.values()) > MAX_LOG_BYTES:
            del self._logs[next(iter(self._logs))]
