"""The process that compiles, as its parent sees it. What it does is in `child.py`."""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from itertools import count
from typing import Self

from pdserve.errors import RequestError, Status
from pdserve.grammar.compiler import Outcome
from pdserve.sampling import StructuredOutput

START_S = 20.0  # on a busy machine
LATE_S = 5.0  # after which a process that says nothing of a question beyond its limit is ended
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
        """Start one with its first line; RequestError where that cannot be."""
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
            raise RequestError(Status.INTERNAL, f"structured_output: {problem} (status {process.returncode})")
        started._reading = asyncio.create_task(started._read(), name="grammar answers")
        return started

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more questions; its forks may answer theirs."""
        return self._process.returncode is not None or self._reading is None or self._reading.done()

    async def compile(self, structured: StructuredOutput, limit_s: float, cpu_limit_s: float) -> Answer:
        """Compile a specification within limits of time and of a processor's time."""
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
        """End it."""
        self._kill()
        if self._reading is not None:
            await asyncio.shield(self._reading)
        await asyncio.shield(self._process.wait())

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _write(self, line: bytes) -> None:
        """Raises OSError where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except RuntimeError as error:  # what uvloop raises of a pipe that has closed
            raise BrokenPipeError from error

    async def _read(self) -> None:
        """Hand answers on until the process ends."""
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
