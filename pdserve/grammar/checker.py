"""Checks what clients want answers to match, before they are admitted.

Each is compiled in a child process, which is killed where that takes too long: nobody else waits for it, and nobody
else ends with it. What was found is remembered.
"""

import asyncio
import json
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pdserve.errors import RequestError, Status, echo, invalid
from pdserve.sampling import StructuredOutput

logger = logging.getLogger(__name__)

COMPILE_S = 1.5
START_S = 20.0  # of a child, on a busy machine
MAX_CHILDREN = 2
MAX_WAITING = 64  # checks
MAX_REMEMBERED = 256
MAX_LINE_BYTES = 1 << 20


class Checker:
    """Checks structured output for one model. Children start when they are first needed."""

    def __init__(self, tokenizer_json: Callable[[], str], eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        self._found: OrderedDict[StructuredOutput, asyncio.Task[str | None]] = OrderedDict()
        self._idle: list[Process] = []
        self._children = asyncio.Semaphore(MAX_CHILDREN)
        self._num_waiting = 0

    async def check(self, structured: StructuredOutput) -> None:
        """Return if a text can match; RequestError names what is wrong, or that too many others are checked."""
        task = self._found.get(structured)
        if task is None:
            if self._num_waiting >= MAX_WAITING:
                text = f"structured_output: {MAX_WAITING} others are being compiled already"
                raise RequestError(Status.RESOURCE_EXHAUSTED, text)
            self._num_waiting += 1
            task = self._found[structured] = asyncio.create_task(self._look(structured), name="grammar")
            task.add_done_callback(self._note_done)
            if len(self._found) > MAX_REMEMBERED:
                self._found.popitem(last=False)  # who waits for it keeps it
        self._found.move_to_end(structured)
        problem = await asyncio.shield(task)
        if problem is not None:
            raise invalid(structured.field, echo(problem))

    async def close(self) -> None:
        """End all children."""
        tasks = list(self._found.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for child in self._idle:
            await _end(child)

    def _note_done(self, task: asyncio.Task[str | None]) -> None:
        self._num_waiting -= 1
        if task.cancelled() or task.exception() is not None:
            self._found = OrderedDict((key, found) for key, found in self._found.items() if found is not task)

    async def _look(self, structured: StructuredOutput) -> str | None:
        """Return what is wrong with a specification, or None."""
        async with self._children:
            child = self._idle.pop() if self._idle else await self._start()
            is_well = False
            try:
                asked = {"format": structured.format, "texts": structured.texts}
                async with asyncio.timeout(COMPILE_S):
                    problem = await _ask(child, asked)
                is_well = True
            except TimeoutError:
                return f"it takes longer than {COMPILE_S} s to compile"
            except (EOFError, OSError):
                return "it is nested too deeply to compile"
            else:
                return problem
            finally:
                if is_well:
                    self._idle.append(child)
                else:
                    await _end(child)

    async def _start(self) -> Process:
        """Start a child; RequestError where it cannot serve this model."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdserve.grammar.child", stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MAX_LINE_BYTES
        )
        first = {"tokenizer": await asyncio.to_thread(self._tokenizer_json), "eos_token_ids": self._eos_token_ids}
        problem: str | None = "the process that compiles does not start"
        try:
            with suppress(EOFError, OSError, TimeoutError):
                async with asyncio.timeout(START_S):
                    problem = await _ask(child, first)
        finally:
            if problem is not None:
                await _end(child)
        if problem is not None:
            logger.error("structured output cannot be compiled: %s", problem)
            raise RequestError(Status.INTERNAL, f"structured_output: {problem}")
        return child


async def _ask(child: Process, question: Mapping[str, object]) -> str | None:
    """Return a child's answer; EOFError where it has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(question).encode() + b"\n")
    await child.stdin.drain()
    line = await child.stdout.readline()
    if not line:
        raise EOFError
    answer: str | None = json.loads(line)
    return answer


async def _end(child: Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    await asyncio.shield(child.wait())
