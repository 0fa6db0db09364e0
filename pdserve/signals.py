"""What SIGTERM and SIGINT do to a process.

Before it serves, a signal ends it at once. While it serves, the first signal drains it; a second one ends it at once,
and so does the time a drain may take. Every signal is handled: the kernel lets process 1 of a container ignore what it
does not handle.

Exit status: 128 + the signal's number where a signal ended the process at once, 75 where its drain took too long.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DRAIN_TIMED_OUT_STATUS = 75  # EX_TEMPFAIL


def exit_status(number: int) -> int:
    """Return the status with which a process exits that a signal ended at once; the same as a shell shows."""
    return 128 + number


def end_on_signals(numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
    """Make these signals end this process at once, without cleaning up."""
    for number in numbers:
        signal.signal(number, _end)


@contextmanager
def drain_on_signals(loop: "asyncio.AbstractEventLoop", drain: Callable[[], None], limit_s: float) -> Iterator[None]:
    """For the length of the block, call `drain` in the loop at the first signal.

    From then on a second signal ends this process at once, and the limit does, in the block or after it.
    """

    def on_first(_number: int, _frame: FrameType | None) -> None:
        end_on_signals()
        end_after(limit_s)
        loop.call_soon_threadsafe(drain)

    before = {number: signal.signal(number, on_first) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_after(limit_s: float) -> None:
    """End this process if it is still there after this many seconds, whatever its threads do."""
    timer = threading.Timer(limit_s, _end_drain, (limit_s,))
    timer.daemon = True
    timer.start()


def _end(number: int, _frame: FrameType | None) -> None:
    _say(f"{signal.Signals(number).name}: this process ends at once")
    os._exit(exit_status(number))


def _end_drain(limit_s: float) -> None:
    _say(f"drain_timeout_s: not drained {limit_s:g} s after a signal: this process ends")
    os._exit(DRAIN_TIMED_OUT_STATUS)


def _say(text: str) -> None:
    """Write a line to stderr. No logging: the interrupted code may be writing a record."""
    os.write(2, f"pdserve: {text}\n".encode())
