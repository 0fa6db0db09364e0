"""Checks what clients want answers to match, before they are admitted.

Each is compiled in a child process, which is killed where that takes too long: nobody else waits for it, and nobody
else ends with it. What was found is remembered; that a child took too long or crashed only for a while, since a busy
machine does that to anything.
"""

import asyncio
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from signal import SIGSEGV

from pdserve.errors import RequestError, Status, echo, invalid
from pdserve.sampling import StructuredOutput

logger = logging.getLogger(__name__)

COMPILE_S = 1.5
START_S = 20.0  # of a child, on a busy machine
MAX_CHILDREN = 2
FORGET_S = 60.0  # after which what took too long, or more than a child has, is tried again
MAX_WAITING = 64  # checks
MAX_WAITING_OF_TENANT = 32
MAX_REMEMBERED = 256
MAX_LINE_BYTES = 1 << 20
COMMAND = (sys.executable, "-P", "-m", "pdserve.grammar.child")
TOO_DEEP = "it is nested too deeply to compile"
TOO_MUCH_MEMORY = "it takes more memory to compile than there is"


@dataclass(slots=True, eq=False)
class _Check:
    """One specification's."""

    task: asyncio.Task[str | None] = field(init=False)
    num_waiting: int = 0  # clients
    is_queued: bool = True  # for a child
    forget_at_s: float = inf  # on the event loop's clock


class Checker:
    """Checks structured output for one model. Children start when they are first needed."""

    def __init__(self, tokenizer_json: Callable[[], str], eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        self._opening = b""  # what each child reads first
        self._checks: OrderedDict[StructuredOutput, _Check] = OrderedDict()
        self._idle: list[Process] = []
        self._children = asyncio.Semaphore(MAX_CHILDREN)
        self._num_waiting: Counter[str] = Counter()  # checks not done, by the tenant that asked first

    async def check(self, structured: StructuredOutput, tenant: str) -> None:
        """Return if a text can match; RequestError names what is wrong, or that too many others are checked."""
        check = self._checks.get(structured)
        if check is None or check.forget_at_s <= asyncio.get_running_loop().time():
            check = self._begin(structured, tenant)
        self._checks.move_to_end(structured)
        check.num_waiting += 1
        try:
            problem = await asyncio.shield(check.task)
        finally:
            check.num_waiting -= 1
            if check.is_queued and not check.num_waiting:
                check.task.cancel()
                self._forget(structured, check)
        if problem is not None:
            raise invalid(structured.field, echo(problem))

    async def close(self) -> None:
        """End all children."""
        tasks = [check.task for check in self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for child in self._idle:
            await _end(child)

    def _begin(self, structured: StructuredOutput, tenant: str) -> _Check:
        if self._num_waiting.total() >= MAX_WAITING:
            raise _too_many(f"{MAX_WAITING} others")
        if self._num_waiting[tenant] >= MAX_WAITING_OF_TENANT:
            raise _too_many(f"{MAX_WAITING_OF_TENANT} others of this tenant")
        self._num_waiting[tenant] += 1
        check = self._checks[structured] = _Check()

        def note_done(task: asyncio.Task[str | None]) -> None:
            self._num_waiting -= Counter((tenant,))  # leaves out who has none
            if task.cancelled() or task.exception() is not None:
                self._forget(structured, check)

        check.task = asyncio.create_task(self._look(structured, check), name="grammar")
        check.task.add_done_callback(note_done)
        if len(self._checks) > MAX_REMEMBERED:
            self._checks.popitem(last=False)  # who waits for it keeps it
        return check

    def _forget(self, structured: StructuredOutput, check: _Check) -> None:
        if self._checks.get(structured) is check:
            del self._checks[structured]

    async def _look(self, structured: StructuredOutput, check: _Check) -> str | None:
        """Return what is wrong with a specification, or None."""
        async with self._children:
            check.is_queued = False
            problem, lasts = await self._compile(structured)
            if problem == TOO_MUCH_MEMORY:  # a child killed as memory ran short may have been no cause of that
                problem, lasts = await self._compile(structured)
            if not lasts:
                check.forget_at_s = asyncio.get_running_loop().time() + FORGET_S
            return problem

    async def _compile(self, structured: StructuredOutput) -> tuple[str | None, bool]:
        """Let a child compile a specification; return what is wrong, and whether it would always be."""
        child = self._idle.pop() if self._idle else await self._start()
        is_well = False
        try:
            asked = json.dumps({"format": structured.format, "texts": structured.texts})
            async with asyncio.timeout(COMPILE_S):
                problem = await _ask(child, asked.encode() + b"\n")
            is_well = True
        except TimeoutError:
            return f"it takes longer than {COMPILE_S} s to compile", False
        except EOFError:
            await _end(child)
            return TOO_DEEP if child.returncode == -SIGSEGV else TOO_MUCH_MEMORY, False
        else:
            return problem, True
        finally:
            if is_well:
                self._idle.append(child)
            else:
                await _end(child)

    async def _start(self) -> Process:
        """Start a child; RequestError where it cannot serve this model."""
        if not self._opening:
            self._opening = await asyncio.to_thread(self._make_opening)  # many megabytes
        child = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_LINE_BYTES
        )
        problem: str | None = "the process that compiles does not start"
        try:
            with suppress(EOFError, TimeoutError):
                async with asyncio.timeout(START_S):
                    problem = await _ask(child, self._opening)
        finally:
            if problem is not None:
                await _end(child)
        if problem is not None:
            logger.error("structured output cannot be compiled: %s (status %s)", problem, child.returncode)
            raise RequestError(Status.INTERNAL, f"structured_output: {problem}")
        return child

    def _make_opening(self) -> bytes:
        first = {"tokenizer": self._tokenizer_json(), "eos_token_ids": self._eos_token_ids}
        return json.dumps(first).encode() + b"\n"


def _too_many(checks: str) -> RequestError:
    return RequestError(Status.RESOURCE_EXHAUSTED, f"structured_output: {checks} are being compiled already")


async def _ask(child: Process, question: bytes) -> str | None:
    """Return a child's answer to a line of JSON; EOFError where it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(question)
        await child.stdin.drain()
        line = await child.stdout.readline()
    except (OSError, RuntimeError) as error:  # the latter is what uvloop raises of a pipe that has closed
        if isinstance(error, TimeoutError):
            raise
        raise EOFError from error
    if not line:
        raise EOFError
    answer: str | None = json.loads(line)
    return answer


async def _end(child: Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    await asyncio.shield(child.wait())
