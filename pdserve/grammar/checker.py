"""Checks specifications of structured output before their requests are admitted.

Each is compiled in a process of its own, which ends when it takes too much: no other check waits for it or ends with
it. A result is remembered for its tenant. That compiling took too much is remembered only for a while, because on a
busy machine any specification may. At most MAX_AT_ONCE are compiled at once, MAX_AT_ONCE_OF_TENANT of one tenant.
"""

import asyncio
import json
import logging
import sys
from asyncio import Semaphore
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Self

from pdserve.base.errors import echo
from pdserve.grammar.compiler import Outcome
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.protocol.sampling import StructuredOutput

START_S = 20.0  # on a busy machine
LATE_S = 5.0  # a process that has not answered so long after a limit is ended
COMMAND = (sys.executable, "-P", "-m", "pdserve.grammar.child")

Answer = tuple[Outcome, str]


class CompilerProcess:
    """Compiles any number of specifications at once."""

    def __init__(self, process: Process) -> None:
        """Use `start`."""
        self._process = process
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = count()
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, opening: bytes) -> Self:
        """Start a process with its first line; RefusedError if it does not start or cannot serve the model."""
        process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        started = cls(process)
        problem: str | None = "the process that compiles does not start"
        try:
            with suppress(OSError):  # TimeoutError among them
                async with asyncio.timeout(START_S):
                    await started._write(opening)
                    assert process.stdout is not None
                    if line := await process.stdout.readline():
                        problem = json.loads(line)
        finally:
            if problem is not None:
                await started.close()
        if problem is not None:
            raise RefusedError(Refused(Cause.INTERNAL, f"structured_output: {problem} (status {process.returncode})"))
        started._reading = asyncio.create_task(started._read(), name="grammar answers")
        return started

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more specifications; its forks may still answer."""
        return self._process.returncode is not None or self._reading is None or self._reading.done()

    async def compile(self, structured: StructuredOutput, limit_s: float, cpu_limit_s: float) -> Answer:
        """Compile a specification within a limit of time and one of processor time."""
        number = next(self._numbers)
        what = {"number": number, "format": structured.format, "texts": structured.texts}
        asked = {**what, "limit_s": limit_s, "cpu_limit_s": cpu_limit_s}
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(limit_s + LATE_S):
                await self._write(json.dumps(asked).encode() + b"\n")
                return await answer
        except OSError:  # TimeoutError among them
            self._kill()
            return Outcome.ENDED, "the process that compiles does not answer"
        finally:
            del self._asked[number]

    async def close(self) -> None:
        self._kill()
        if self._reading is not None:
            await asyncio.shield(self._reading)
        await asyncio.shield(self._process.wait())

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _write(self, line: bytes) -> None:
        """Write a line; OSError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except RuntimeError as error:  # uvloop raises this for a closed pipe
            raise BrokenPipeError from error

    async def _read(self) -> None:
        """Settle answers until the process ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            number, outcome, text = json.loads(line)
            self._settle(number, (Outcome(outcome), text))
        for number in self._asked:
            self._settle(number, (Outcome.ENDED, "the process that compiles has ended"))

    def _settle(self, number: int, answer: Answer) -> None:
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(answer)


logger = logging.getLogger(__name__)

COMPILE_S = 10.0  # on a busy machine, where the fork waits for a processor
COMPILE_CPU_S = 0.5  # workers spend it again, one specification after another
MAX_AT_ONCE = 16
MAX_AT_ONCE_OF_TENANT = 12
PLACE_S = 5.0  # a check that has waited so long for a place is refused
FORGET_S = 60.0  # a specification that took too much may be tried again after this time
MAX_WAITING = 64  # checks
MAX_WAITING_OF_TENANT = 32
MAX_REMEMBERED = 256


Key = tuple[str, StructuredOutput]  # a tenant's specification


@dataclass(slots=True, eq=False)
class _Check:
    task: asyncio.Task[str | None] = field(init=False)
    num_waiting: int = 0  # clients
    has_place: bool = False  # it is compiled, or was
    forget_at_s: float = inf  # on the event loop's clock


class Checker:
    """Checks structured output for one model. The process that compiles starts when it is first needed."""

    def __init__(self, tokenizer_json: Callable[[], str], eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        self._checks: OrderedDict[Key, _Check] = OrderedDict()
        self._num_waiting: Counter[str] = Counter()  # checks not done, by tenant
        self._places = Semaphore(MAX_AT_ONCE)
        self._places_of: dict[str, Semaphore] = {}  # of tenants with checks that are not done
        self._starting: asyncio.Task[CompilerProcess] | None = None

    async def check(self, structured: StructuredOutput, tenant: str) -> None:
        """Return if a text can match; RefusedError says what is wrong, or that too many others are checked."""
        key = tenant, structured
        check = self._checks.get(key)
        if check is None or check.forget_at_s <= asyncio.get_running_loop().time():
            check = self._begin(key)
        self._checks.move_to_end(key)
        check.num_waiting += 1
        try:
            problem = await asyncio.shield(check.task)
        finally:
            check.num_waiting -= 1
            if not check.num_waiting and not check.has_place:
                check.task.cancel()
                self._forget(key, check)
        if problem is not None:
            raise invalid(structured.field, echo(problem))

    async def close(self) -> None:
        tasks: list[asyncio.Task[str | None] | asyncio.Task[CompilerProcess]] = [
            check.task for check in self._checks.values()
        ]
        if self._starting is not None:
            tasks.append(self._starting)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, CompilerProcess):
                await ended.close()

    def _begin(self, key: Key) -> _Check:
        tenant, structured = key
        if self._num_waiting.total() >= MAX_WAITING:
            raise _too_many(f"{MAX_WAITING} others")
        if self._num_waiting[tenant] >= MAX_WAITING_OF_TENANT:
            raise _too_many(f"{MAX_WAITING_OF_TENANT} others of this tenant")
        self._num_waiting[tenant] += 1
        own_places = self._places_of.setdefault(tenant, Semaphore(MAX_AT_ONCE_OF_TENANT))
        check = self._checks[key] = _Check()

        def note_done(task: asyncio.Task[str | None]) -> None:
            self._num_waiting -= Counter((tenant,))  # drops a tenant whose count reaches 0
            if not self._num_waiting[tenant]:
                del self._places_of[tenant]
            if task.cancelled() or task.exception() is not None:
                self._forget(key, check)

        check.task = asyncio.create_task(self._look(structured, check, own_places), name="grammar")
        check.task.add_done_callback(note_done)
        if len(self._checks) > MAX_REMEMBERED:
            self._checks.popitem(last=False)  # clients that wait for it hold it themselves
        return check

    def _forget(self, key: Key, check: _Check) -> None:
        if self._checks.get(key) is check:
            del self._checks[key]

    async def _look(self, structured: StructuredOutput, check: _Check, own_places: Semaphore) -> str | None:
        """Return what is wrong with a specification, or None; RefusedError if that cannot be found out."""
        await self._process()  # first, because its start may take longer than PLACE_S
        async with AsyncExitStack() as places:
            try:
                async with asyncio.timeout(PLACE_S):
                    for each in (own_places, self._places):  # who waits for a tenant's place holds no common one
                        await places.enter_async_context(each)
            except TimeoutError as error:
                raise _too_many("too many others") from error
            check.has_place = True
            process = await self._process()  # a new one if the first has ended
            outcome, text = await process.compile(structured, COMPILE_S, COMPILE_CPU_S)
        match outcome:
            case Outcome.COMPILED:
                return None
            case Outcome.ENDED:
                logger.error("structured output: %s", text)
                raise RefusedError(Refused(Cause.COMPILER, f"{structured.field}: {text}"))
            case Outcome.REFUSED:
                return text
            case Outcome.OVER_LIMIT:
                check.forget_at_s = asyncio.get_running_loop().time() + FORGET_S
                return text

    async def _process(self) -> CompilerProcess:
        """Return the process that compiles; RefusedError if it cannot serve this model."""
        if self._starting is not None and self._starting.done():
            failed = self._starting.cancelled() or self._starting.exception() is not None
            if failed or self._starting.result().has_ended:
                self._starting = None
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="grammar process")
        return await asyncio.shield(self._starting)

    async def _start(self) -> CompilerProcess:
        return await CompilerProcess.start(await asyncio.to_thread(self._make_opening))

    def _make_opening(self) -> bytes:
        first = {"tokenizer": self._tokenizer_json(), "eos_token_ids": self._eos_token_ids}
        return json.dumps(first).encode() + b"\n"  # many megabytes


def _too_many(checks: str) -> RefusedError:
    return RefusedError(Refused(Cause.PREPARING, f"structured_output: {checks} are being compiled already"))
