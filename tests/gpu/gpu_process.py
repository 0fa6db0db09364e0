"""The process that computes sections, and the one that watches it.

Invariant: no section costs another its figures. One that raises, kills its process or leaves the device unusable ends
alone, and the next one gets a new process. One that outlasts its time is stopped between two cases, or killed.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from gpu_report import Row, Section, failure

if TYPE_CHECKING:
    from gpu_device import Device

START_S = 60.0  # most that a process takes to import torch and find its device
GRACE_S = 20.0  # for the case that is under way when a section's time is over
KILLED_S = 30.0  # most that a driver takes to end a process with a kernel that runs for ever
DONE, LATE, LOST = "done", "out of time", "stopped: the device is lost"


@dataclass(frozen=True, slots=True)
class Options:
    """How sections are run: with tiny shapes on a CPU, and with every check."""

    is_dry: bool = False
    is_thorough: bool = False


@dataclass(slots=True)
class Record:
    """What became of a section."""

    state: str = "not run"
    budget_s: float = 0.0
    took_s: float = 0.0
    clocks: str = ""
    rows: list[Row] = field(default_factory=list)


class Computing:
    """Runs sections one after another in a process of their own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._process: multiprocessing.process.BaseProcess | None = None
        self.facts: dict[str, str] = {}

    def run(self, section: Section, seconds: float, limit_s: float) -> Record:
        """Run a section for some seconds; its process is killed after `limit_s`."""
        record, started_s = Record(budget_s=seconds), time.perf_counter()
        try:
            self._run(section, record, limit_s)
        except (EOFError, OSError):
            record.state = self._end()
            record.rows.append(failure(section.name, record.state))
        record.took_s = time.perf_counter() - started_s
        return record

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(5)
            self._end()

    def _run(self, section: Section, record: Record, limit_s: float) -> None:
        if self._process is None:
            self._start()
        until_s = time.perf_counter() + limit_s
        self._pipe.send((section, record.budget_s))
        while self._pipe.poll(max(0.0, until_s - time.perf_counter())):
            said = self._pipe.recv()
            if isinstance(said, Row):
                record.rows.append(said)
                continue
            record.state, record.clocks = said
            if record.state == LOST:
                self._end()
            return
        self._end()
        record.state = "killed: it did not end"
        record.rows.append(failure(section.name, record.state))

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, self._options))
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_S):
            raise OSError("the process does not start")
        self.facts = self._pipe.recv()

    def _end(self) -> str:
        """Kill the process and all that it has started; return how it ended."""
        process, self._process = self._process, None
        if process is None or process.pid is None:
            return "no process"
        process.join(1)
        died = process.exitcode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(KILLED_S)
        return f"the process ended with status {died}" if died is not None else "the process was killed"


def deal(sections: list[Section], seconds: float) -> Iterator[tuple[Section, float, float]]:
    """Yield each section, its share of what is left of the time by its weight, and what may be left at most."""
    until_s = time.perf_counter() + seconds
    for place, section in enumerate(sections):
        left_s = max(0.0, until_s - time.perf_counter())
        share_s = left_s * section.weight / sum(each.weight for each in sections[place:])
        yield section, share_s, min(left_s, share_s + GRACE_S)


def run_section(section: Section, device: "Device", seconds: float, tell: Callable[[Row], None]) -> str:
    """Run a section's cases until its time is over, and tell of each row; return how that ended."""
    until_s, count = time.perf_counter() + seconds, 0
    try:
        cases = section.cases(device)
        while (found := next(cases, None)) is not None:
            name, case = found
            if time.perf_counter() > until_s:
                tell(Row("out of time", note=f"after {count} cases and {seconds:.0f} s; the first left out is {name}"))
                return LATE
            if not _run_case(name, case, device, tell):
                return LOST
            count += 1
            del found, case  # and what they hold, such as a model, before the next one is set up
    except Exception as error:  # noqa: BLE001 - the other sections count
        traceback.print_exc()
        tell(failure(section.name, error))
        return DONE if _is_well(device) else LOST
    return DONE


def _run_case(name: str, case: Callable[[], Iterable[Row]], device: "Device", tell: Callable[[Row], None]) -> bool:
    """Run a case; return whether the device can be used after it."""
    try:
        for row in case():
            tell(row)
    except Exception as error:  # noqa: BLE001 - the other cases count
        traceback.print_exc()
        tell(failure(name, error))
        return _is_well(device)
    return True


def _is_well(device: "Device") -> bool:
    try:
        device.synchronize()
        device.empty()
    except Exception:  # noqa: BLE001 - any error says the same
        return False
    return True


def _serve(pipe: Connection, options: Options) -> None:
    """Compute sections until the pipe ends."""
    os.setpgid(0, 0)  # so that all that a section starts can be killed with it
    from gpu_device import device_of  # noqa: PLC0415 - the watching process has no use for torch

    device = device_of(is_dry=options.is_dry, is_thorough=options.is_thorough)
    pipe.send(device.facts())
    with suppress(EOFError):
        while True:
            section, seconds = pipe.recv()
            state = run_section(section, device, seconds, pipe.send)
            if state != LOST:
                device.empty()
            pipe.send((state, device.clocks()))
