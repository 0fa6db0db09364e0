"""Keep child processes running: start them, start them again when they die, stop them in order.

Every exit is announced the moment the process has been reaped, before anything else is done about it.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.clock import Clock
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation
from pdserve.incarnation import new_incarnation
from pdserve.launch.folder import ProcessState
from pdserve.launch.plan import ChildSpec, Role
from pdserve.signals import DRAIN_TIMED_OUT_STATUS, STOP_SIGNALS, exit_status

NEVER_STARTED = Incarnation(0)
# A drain or a signal ended it. When memory runs out, that is SIGKILL as well.
FROM_OUTSIDE = {0, DRAIN_TIMED_OUT_STATUS, -signal.SIGKILL}.union(*((-n, exit_status(n)) for n in STOP_SIGNALS))
CONFIG_EXIT_STATUS = 2  # a process refuses its configuration; at its first start, another one would not help


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling delays before a process is started again; one that ran for `healthy_s` begins again with the first."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 10.0

    def next_delay_s(self, previous_s: float | None, ran_s: float) -> float:
        """Return the delay after a run of `ran_s`, where `previous_s` was the one before that run, if any."""
        if previous_s is None or ran_s >= self.healthy_s:
            return self.first_s
        return min(2 * previous_s, self.longest_s)


@dataclass(frozen=True, slots=True)
class ChildExit:
    """A process has ended and has been reaped: nothing of it runs any more."""

    spec: ChildSpec
    incarnation: Incarnation
    status: int  # exit status, or minus the signal that ended it
    restart_in_s: float | None  # None: it is not started again

    @property
    def from_outside(self) -> bool:
        """Whether a signal from outside, or a drain, ended it: nothing that it did itself."""
        return self.status in FROM_OUTSIDE


@dataclass(frozen=True, slots=True)
class Stage:
    """Children that are asked to end together, and by when they must have ended."""

    roles: tuple[Role, ...]
    within_s: float  # after the first stage began


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: Process | None = None
    incarnation: Incarnation = NEVER_STARTED
    num_restarts: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # for good

    def state(self) -> ProcessState:
        return ProcessState(
            name=self.spec.name,
            role=self.spec.role,
            pid=self.process.pid if self.process is not None else None,
            incarnation=self.incarnation,
            num_restarts=self.num_restarts,
        )


class Supervisor:
    """Owns the child processes of one cluster: `run` keeps them until `stop` or `kill` ends them."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        log_dir: Path,
        clock: Clock,
        *,
        environment: Mapping[str, str] | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._children = [_Child(spec) for spec in children]
        self._log_dir = log_dir
        self._clock = clock
        self._environment = environment
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """What runs now."""
        return tuple(child.state() for child in self._children)

    def log_file(self, name: str) -> Path:
        """Return where the output of the process `name` goes."""
        return self._log_dir / f"{name}.log"

    def last_words(self, name: str) -> str:
        """Return the last line that the process `name` wrote."""
        lines = self.log_file(name).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    async def run(self, on_exit: Callable[[ChildExit], None], on_start: Callable[[], None]) -> None:
        """Keep all children running until stopped; what `on_exit` raises ends them all.

        Raises an ExceptionGroup, with ConfigError in it when a child refuses its configuration at its first start.
        Whatever ends this call, no child is left running.
        """
        try:
            async with asyncio.TaskGroup() as keepers:
                for child in self._children:
                    keepers.create_task(self._keep(child, on_exit, on_start))
        finally:
            self.kill()

    async def stop(self, stages: Sequence[Stage]) -> None:
        """Ask the children to end, stage after stage; kill what does not in its time."""
        self._stopping.set()
        began_s = asyncio.get_running_loop().time()
        for stage in stages:
            leaving = [child for child in self._children if child.spec.role in stage.roles]
            _signal(leaving, signal.SIGTERM)
            try:
                async with asyncio.timeout_at(began_s + stage.within_s):
                    for child in leaving:
                        await child.ended.wait()
            except TimeoutError:
                _signal(leaving, signal.SIGKILL)

    def kill(self) -> None:
        """End all children at once."""
        self._stopping.set()
        _signal(self._children, signal.SIGKILL)

    async def _keep(self, child: _Child, on_exit: Callable[[ChildExit], None], on_start: Callable[[], None]) -> None:
        delay_s: float | None = None
        try:
            while not self._stopping.is_set():
                started_s = self._clock.now_s()
                process = await self._start(child)
                on_start()
                status = await _until_ended(child, process)
                previous_s = None if status in FROM_OUTSIDE else delay_s  # what it did itself may happen again
                delay_s = self._backoff.next_delay_s(previous_s, self._clock.now_s() - started_s)
                refused = status == CONFIG_EXIT_STATUS and child.num_restarts == 0
                again = not self._stopping.is_set() and not refused
                on_exit(ChildExit(child.spec, child.incarnation, status, delay_s if again else None))
                if not again:
                    break
                await self._pause(delay_s)
                child.num_restarts += 1
        finally:
            child.ended.set()
        if not self._stopping.is_set():
            name = child.spec.name
            raise ConfigError(f"{name} refuses its configuration: {self.last_words(name)}")

    async def _start(self, child: _Child) -> Process:
        child.incarnation = new_incarnation()
        command = child.spec.command_for(child.incarnation)
        with self.log_file(child.spec.name).open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pdserve.launch.die_with_parent", str(os.getpid())),
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
            )
        if self._stopping.is_set():  # whoever stopped the others did not see this one yet
            child.process.terminate()
        return child.process

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


async def _until_ended(child: _Child, process: Process) -> int:
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    finally:
        child.process = None


def _signal(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        if child.process is not None and child.process.returncode is None:
            child.process.send_signal(number)
