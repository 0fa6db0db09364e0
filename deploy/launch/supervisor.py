"""Keep child processes running: start them, start them again when they die, stop them in order.

Children may be added and retired while others run.

Invariant: an exit is announced, and the next process of its name started, once the process and all that it had started
in its process group have been reaped: the other ranks of a worker write into pages of others, too.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import grpc

from pdserve.base.clock import Clock, new_incarnation
from pdserve.base.errors import CommandError, ConfigError
from pdserve.base.ids import Incarnation, WorkerId
from pdserve.base.processes import is_from_outside
from pdserve.base.signals import adopting_orphans, end_group
from pdserve.launch.devices import Devices
from pdserve.launch.folder import ProcessState
from pdserve.launch.plan import ChildSpec, ProcessRole
from pdserve.net.operator_client import AdminClient

logger = logging.getLogger(__name__)

NEVER_STARTED = Incarnation(0)
REPORT_TIMEOUT_S = 60.0
SLOW_END_S = 5.0  # of what a process has started, behind its own end: it is told after so long
NO_ROUTER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
CONFIG_EXIT_STATUS = 2  # a process refuses its configuration; at its first start, another one would not help


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling delays before a process is started again; one that ran for `healthy_s` begins again with the first."""

    first_s: float = 1.0
    longest_s: float = 30.0
    healthy_s: float = 10.0

    def next_delay_s(self, previous_s: float | None, ran_s: float) -> float:
        """Return the delay after a run of `ran_s`. `previous_s`: the delay before that run, if there was one."""
        if previous_s is None or ran_s >= self.healthy_s:
            return self.first_s
        return min(2 * previous_s, self.longest_s)


@dataclass(frozen=True, slots=True)
class ChildExit:
    """A process has ended, and all that it had started: nothing of it runs any more."""

    spec: ChildSpec
    incarnation: Incarnation
    status: int  # exit status, or minus the signal that ended it
    restart_in_s: float | None  # None: it is not started again

    @property
    def from_outside(self) -> bool:
        """Whether a signal from outside, or a drain, ended it: nothing that it did itself."""
        return is_from_outside(self.status)


async def report_end(router: AdminClient, exit_: ChildExit) -> None:
    """Report an end to a router, once one is there; give up after a minute without one.

    The report is the proof that nothing of that process can write into another worker's pages any more.
    """
    name = WorkerId(exit_.spec.name)
    try:
        await router.report_gone(name, exit_.incarnation, REPORT_TIMEOUT_S, from_outside=exit_.from_outside)
    except grpc.aio.AioRpcError as error:  # the worker's next incarnation is the same proof
        if error.code() not in NO_ROUTER:
            logger.error("the end of %s is not reported: %s, %s", name, error.code().name, error.details())


@dataclass(frozen=True, slots=True)
class Stage:
    """Children that are asked to end together, and by when they must have ended."""

    roles: tuple[ProcessRole, ...]
    within_s: float  # after the first stage began: a slow one leaves less time to those after it


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    is_late: bool = False  # added while others ran: if it refuses its configuration, it alone ends
    process: Process | None = None
    incarnation: Incarnation = NEVER_STARTED
    num_restarts: int = 0
    has_been_asked: bool = False  # to end: a second SIGTERM would end it without a drain
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # it is not started again
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # for good

    def state(self) -> ProcessState:
        return ProcessState(
            name=self.spec.name,
            role=self.spec.role,
            pid=self.process.pid if self.process is not None else None,
            incarnation=self.incarnation,
            num_restarts=self.num_restarts,
            leaving=self.leaving.is_set(),
        )

    def ask_to_end(self) -> None:
        self.leaving.set()
        if not self.has_been_asked and self.process is not None:
            self.has_been_asked = True
            self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Supervisor:
    """Owns a cluster's child processes: `run` keeps each until it is retired, all until `stop` or `kill` ends them."""

    def __init__(
        self,
        children: Sequence[ChildSpec],
        log_dir: Path,
        clock: Clock,
        *,
        environment: Mapping[str, str] | None = None,
        backoff: Backoff | None = None,
        devices: Devices | None = None,
    ) -> None:
        self._children = {spec.name: _Child(spec) for spec in children}
        self._log_dir = log_dir
        self._clock = clock
        self._environment = environment
        self._backoff = backoff or Backoff()
        self._devices = devices
        self._stopping = asyncio.Event()
        self._begin: Callable[[_Child], object] | None = None  # keeps a child running, while `run` does
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def processes(self) -> tuple[ProcessState, ...]:
        """What runs now, and what will run again."""
        return tuple(child.state() for child in self._children.values())

    @property
    def is_stopping(self) -> bool:
        """Whether all children are to end."""
        return self._stopping.is_set()

    def log_file(self, name: str) -> Path:
        """Return where the output of the process `name` goes."""
        return self._log_dir / f"{name}.log"

    def last_words(self, name: str) -> str:
        """Return the last line that the process `name` wrote."""
        try:
            lines = self.log_file(name).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    async def run(self, on_exit: Callable[[ChildExit], None], on_change: Callable[[], None]) -> None:
        """Keep all children running until stopped; what `on_exit` raises ends them all.

        `on_change` is called when a process has been started, and when a retired one is no longer listed.

        Raises an ExceptionGroup, with ConfigError in it when a child refuses its configuration at its first start.
        Whatever ends this call, no child is left running.
        """
        try:
            with adopting_orphans():
                await self._keep_all(on_exit, on_change)
        finally:
            self._begin = None
            self.kill()

    def add(self, spec: ChildSpec) -> None:
        """Keep one more child running; CommandError where its name is taken, or nothing runs."""
        if spec.name in self._children:
            raise CommandError(f"{spec.name} is here already")
        if self._begin is None or self.is_stopping:
            raise CommandError(f"{spec.name} is not started: the cluster is stopping")
        child = self._children[spec.name] = _Child(spec, is_late=True)
        self._begin(child)

    def retire(self, name: str, within_s: float) -> None:
        """Ask a child to end for good; kill it if it still runs after this many seconds. KeyError: there is none."""
        child = self._children[name]
        if not child.leaving.is_set():
            child.ask_to_end()
            task = asyncio.create_task(_end([child], asyncio.get_running_loop().time() + within_s))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def stop(self, stages: Sequence[Stage]) -> None:
        """Ask the children to end, stage after stage; kill what does not in its time."""
        self._halt()
        began_s = asyncio.get_running_loop().time()
        for stage in stages:
            leaving = [child for child in self._children.values() if child.spec.role in stage.roles]
            for child in leaving:
                child.ask_to_end()
            await _end(leaving, began_s + stage.within_s)

    def kill(self) -> None:
        """End all children at once."""
        self._halt()
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    def _halt(self) -> None:
        """Let no child begin from now on."""
        self._stopping.set()
        for child in self._children.values():
            child.leaving.set()

    async def _keep_all(self, on_exit: Callable[[ChildExit], None], on_change: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as keepers:

            def begin(child: _Child) -> None:
                keepers.create_task(self._keep(child, on_exit, on_change))

            for child in self._children.values():
                begin(child)
            self._begin = begin
            await self._stopping.wait()

    async def _keep(self, child: _Child, on_exit: Callable[[ChildExit], None], on_change: Callable[[], None]) -> None:
        name = child.spec.name
        delay_s: float | None = None
        try:
            while not child.leaving.is_set():
                started_s = self._clock.now_s()
                process = await self._start(child)
                on_change()
                status = await _until_ended(child, process)
                previous_s = None if is_from_outside(status) else delay_s  # a crash of its own may happen again
                delay_s = self._backoff.next_delay_s(previous_s, self._clock.now_s() - started_s)
                refused = status == CONFIG_EXIT_STATUS and child.num_restarts == 0 and not child.leaving.is_set()
                again = not (refused or child.leaving.is_set())
                on_exit(ChildExit(child.spec, child.incarnation, status, delay_s if again else None))
                if refused and not child.is_late:
                    raise ConfigError(f"{name} refuses its configuration: {self.last_words(name)}")
                if not again:
                    break
                await _pause(child, delay_s)
                child.num_restarts += 1
            if not self.is_stopping:
                del self._children[name]
                if self._devices is not None:
                    self._devices.release(name)
                on_change()
        finally:
            child.ended.set()

    def _opened_log(self, name: str) -> IO[bytes]:
        """Return the log of a process, or the null device where the log can be written no more."""
        try:
            return self.log_file(name).open("ab")
        except OSError:  # such as when the user has logged out, and /run/user/ID is gone with all that runs from it
            return Path(os.devnull).open("ab")

    def _environment_of(self, spec: ChildSpec) -> Mapping[str, str] | None:
        if self._devices is None:
            return self._environment
        inherited = os.environ if self._environment is None else self._environment
        return {**inherited, **self._devices.hold(spec.name, spec.role)}

    async def _start(self, child: _Child) -> Process:
        child.incarnation = new_incarnation()
        command = child.spec.command_for(child.incarnation)
        with self._opened_log(child.spec.name) as log:
            child.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pdserve.base.signals", str(os.getpid())),
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=self._environment_of(child.spec),
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
            )
        if child.leaving.is_set():  # it was asked to end before this process was there
            child.ask_to_end()
        return child.process


async def _until_ended(child: _Child, process: Process) -> int:
    """Return a process's status, once nothing of its process group runs any more."""
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    finally:
        child.process = None
        await _end_of_group(child.spec.name, process.pid)


async def _end_of_group(name: str, number: int) -> None:
    """Return once nothing of a process group runs, also where this task is cancelled meanwhile."""
    ending = asyncio.create_task(asyncio.to_thread(end_group, number))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            _, waiting = await asyncio.wait((ending,), timeout=SLOW_END_S)
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        if waiting:
            logger.warning("%s has ended, but not all processes of its group %d; their end is waited for", name, number)
    if cancelled is not None:
        raise cancelled


async def _pause(child: _Child, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await child.leaving.wait()


async def _end(children: Sequence[_Child], at_s: float) -> None:
    """Wait until these have ended, and kill at a moment of the loop's clock those that have not."""
    try:
        async with asyncio.timeout_at(at_s):
            for child in children:
                await child.ended.wait()
    except TimeoutError:
        for child in children:
            child.signal(signal.SIGKILL)
