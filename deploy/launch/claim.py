"""Let owners of one worker follow each other on a machine, however the earlier ones ended.

Invariant: nothing of the processes that an earlier owner started runs once the next one has the claim. A killed process
may run on for seconds, while the kernel gives back the memory of its devices: it has no environment any more by then,
so it is known by its session, whose number no other gets meanwhile.
"""

import fcntl
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

OWNER = "PDSERVE_OWNER"  # variable of the environment of a worker's processes, which says who owns them
_LENGTH = 64  # bytes of the file
_SESSION, _STARTED = 3, 19  # fields of /proc/PID/stat behind the name, see proc(5)


class Session(NamedTuple):
    """A session of processes, by its leader: a worker's process, and its ranks."""

    leader: int  # its process id, and the session's number
    started: int  # when it was started, in ticks of the kernel's clock since the machine was

    @classmethod
    def of(cls, process_id: int) -> Self | None:
        """Return the session of a process, with the time at which this process was started. None if it is reaped."""
        try:
            stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()
        return cls(int(fields[_SESSION]), int(fields[_STARTED]))


class Claim:
    """A file that one owner at a time holds, which names the last session of processes that it started."""

    def __init__(self, path: Path, owner: str) -> None:
        """Wait for an earlier owner's end, and for that of its processes, which are killed. Blocks."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        told = os.pread(self._file, _LENGTH, 0).split()
        self._last = Session(*map(int, told)) if told else None
        _end_all(owner, self._last)

    def note(self, leader: int) -> None:
        """Write down which process has just been started. On a full disk its environment alone tells of it."""
        session = Session.of(leader)
        if session is None or session == self._last:
            return
        self._last = session
        with suppress(OSError):
            os.pwrite(self._file, f"{session.leader} {session.started}".ljust(_LENGTH).encode(), 0)

    def close(self) -> None:
        """Leave the worker to another owner."""
        os.close(self._file)


def _end_all(owner: str, session: Session | None) -> None:
    """Kill the processes that run for an owner, or are of its session; return once all of them have ended."""
    is_over = False
    while not is_over:  # one may have started another meanwhile
        is_over = True
        for process_id in psutil.pids():
            with _running(process_id) as process:
                if process is not None and _is_of(process_id, owner, session):
                    is_over = False
                    with suppress(ProcessLookupError):  # it has just been reaped
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                    _has_ended(process, timeout_ms=None)


@contextmanager
def _running(process_id: int) -> Iterator[int | None]:
    """Yield a descriptor that can be read once all threads of a process have ended; None if they have."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        yield None
        return
    try:
        yield None if _has_ended(descriptor, timeout_ms=0) else descriptor
    finally:
        os.close(descriptor)


def _has_ended(process: int, timeout_ms: int | None) -> bool:
    end = select.poll()
    end.register(process, select.POLLIN)
    return bool(end.poll(timeout_ms))


def _is_of(process_id: int, owner: str, session: Session | None) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is another user's
        if psutil.Process(process_id).environ().get(OWNER) == owner:
            return True
    if session is None or Session.of(session.leader) not in (None, session):
        return False  # or the number has become another's: all of the former session have ended
    its = Session.of(process_id)
    return its is not None and its.leader == session.leader
