"""A supervisor that runs for the length of a block, and what it announced."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.launch.supervisor import ChildExit, Supervisor


class Record:
    """What a supervisor announced, and a way to wait for it."""

    def __init__(self) -> None:
        self.exits: list[ChildExit] = []
        self.num_starts = 0
        self._changed = asyncio.Condition()

    def on_exit(self, exit_: ChildExit) -> None:
        self.exits.append(exit_)
        self._wake()

    def on_start(self) -> None:
        self.num_starts += 1
        self._wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(condition)

    def _wake(self) -> None:
        self._waking = asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def supervised(supervisor: Supervisor, record: Record) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run(record.on_exit, record.on_start))
        try:
            yield
        finally:
            supervisor.kill()
            await run
