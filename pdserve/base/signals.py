"""What SIGTERM, SIGINT and SIGHUP do to a process.

Before a process serves, a signal ends it at once. While it serves, the first signal drains it; a second one ends it at
once, and so does the limit of a drain's time. Signals within half a second of the first count as the same request:
systemd signals every process of a service, and a launcher among them passes the signal on to its children. Every signal
has a handler: the kernel ignores signals to process 1 of a container that have none.

A terminal that closes sends SIGHUP. It never counts as a second signal. Where it was ignored at the start, as under
nohup, it stays ignored.

Exit status: 128 + the signal's number where a signal ended the process at once, 75 where its drain took too long.

`python -m pdserve.base.signals` runs another program, which the kernel kills when its parent ends, however it ends.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from pdserve.base.processes import DRAIN_TIMED_OUT_STATUS, STOP_SIGNALS, exit_status

if TYPE_CHECKING:
    import asyncio

CLOSING_S = 5.0  # after drain_timeout_s: the last replies of HTTP and gRPC, the last spans, and a second to spare
SAME_REQUEST_S = 0.5
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_ADOPTERS: set[object] = set()  # blocks of `adopting_orphans` that have not ended


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process: not SIGHUP where it is ignored."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_deaf and number is signal.SIGHUP))


def end_on_signals(numbers: Iterable[signal.Signals] | None = None) -> None:
    """Make these signals, by default all that stop a process, end this one at once, without cleaning up."""
    for number in heeded_signals() if numbers is None else numbers:
        signal.signal(number, _end)


@contextmanager
def drain_on_signals(loop: "asyncio.AbstractEventLoop", drain: Callable[[], None], limit_s: float) -> Iterator[None]:
    """For the length of the block, call `drain` in the loop at the first signal.

    After that, a second signal ends this process at once, and so does the limit, in the block or after it.
    """

    requests = StopRequests()

    def receive(number: int, frame: FrameType | None) -> None:
        match requests.receive(time.monotonic(), number):
            case Request.FIRST:
                end_after(limit_s)
                loop.call_soon_threadsafe(drain)
            case Request.SECOND:
                _end(number, frame)
            case Request.SAME:
                pass

    before = {number: signal.signal(number, receive) for number in heeded_signals()}
    try:
        yield
    finally:
        if not requests.any:
            for number, handler in before.items():
                signal.signal(number, handler)


class Request(Enum):
    FIRST = "first"
    SAME = "same"
    SECOND = "second"


class StopRequests:
    """Distinguishes a second request to stop from a duplicate of the first signal."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    @property
    def any(self) -> bool:
        return self._first_s is not None

    def receive(self, now_s: float, number: int) -> Request:
        if self._first_s is None:
            self._first_s = now_s
            return Request.FIRST
        is_same = now_s - self._first_s < SAME_REQUEST_S or number == signal.SIGHUP
        return Request.SAME if is_same else Request.SECOND


def end_after(limit_s: float) -> None:
    """End this process after this many seconds, whatever its threads do."""
    _end_later(limit_s, f"drain_timeout_s: not drained {limit_s:g} s after a signal", DRAIN_TIMED_OUT_STATUS)


def end_after_kill(number: int, limit_s: float) -> None:
    """End this process, which has killed others because of a signal, after this time: one of them may never end."""
    why = f"{signal.Signals(number).name}: processes have not ended {limit_s:g} s after they were killed"
    _end_later(limit_s, why, exit_status(number))


def _end_later(limit_s: float, why: str, status: int) -> None:
    timer = threading.Timer(limit_s, _end_because, (why, status))
    timer.daemon = True
    timer.start()


def end_served(status: int) -> NoReturn:
    """End this process, which has closed everything, without Python's own shutdown.

    During that, threads of libraries can crash, and torch would need a second.
    """
    logging.shutdown()
    os._exit(status)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when `parent_pid` ends, on Linux; exit at once if it already has."""
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        sys.exit(1)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """For the length of the block, descendants whose parent ends become children of this process, on Linux."""
    adopter = object()
    _ADOPTERS.add(adopter)
    _adopt(is_wanted=True)
    try:
        yield
    finally:
        _ADOPTERS.remove(adopter)
        _adopt(is_wanted=bool(_ADOPTERS))


def end_group(number: int) -> None:
    """Kill what is left of a process group, whose leader has been reaped; return once it has ended. Blocks.

    Call it within `adopting_orphans`: all that the leader has left behind are children of this process then. Reaping
    a process proves more than the end of its files and sockets: nothing that it does in the kernel goes on.
    """
    while _has_children_in(number):
        os.killpg(number, signal.SIGKILL)  # such a child keeps the number from being given to another group
        with suppress(ChildProcessError):
            os.waitpid(-number, 0)


def _has_children_in(group: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _adopt(*, is_wanted: bool) -> None:
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, is_wanted)


def _prctl(option: int, argument: int) -> None:
    import ctypes  # noqa: PLC0415 - few processes need it

    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _end(number: int, _frame: FrameType | None) -> None:
    _say(f"{signal.Signals(number).name}: this process ends at once")
    os._exit(exit_status(number))


def _end_because(why: str, status: int) -> None:
    _say(f"{why}: this process ends")
    os._exit(status)


def _say(text: str) -> None:
    """Write a line to stderr, if possible. Logging is not safe: the interrupted code may be writing a record."""
    with suppress(OSError):  # a full disk, or a pipe that nobody reads: the process ends all the same
        os.write(2, f"pdserve: {text}\n".encode())


if __name__ == "__main__":  # arguments: PARENT_PID PROGRAM ARGUMENT...: the setting outlives exec
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
