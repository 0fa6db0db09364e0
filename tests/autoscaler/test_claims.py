"""An owner of a worker begins once nothing that an earlier one started runs, however far that is in its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.launch.claim import OWNER, Claim, Session

ME = "the-owner"
# Its first thread ends by exit(2) (number 60), so the kernel has taken its environment; another one goes on.
WITHOUT_FIRST_THREAD = """
import ctypes, threading, sys
threading.Thread(target=sys.stdin.read).start()
print("running", flush=True)
ctypes.CDLL(None).syscall(93 if "aarch64" in sys.argv[1] else 60, 0)
"""
WAITING = "import sys; print('running', flush=True); sys.stdin.read()"


@contextmanager
def started(text: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, in a session of its own as workers are."""
    command = [sys.executable, "-c", text, os.uname().machine]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, env={**os.environ, **environment}, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        try:
            yield process
        finally:
            process.kill()


def claimed(path: Path) -> None:
    """Claim the worker, as an owner does that begins."""
    Claim(path, ME).close()


def test_a_process_that_has_lost_its_environment_is_awaited(tmp_path: Path) -> None:
    with started(WITHOUT_FIRST_THREAD, **{OWNER: ME}) as process:
        former = Claim(tmp_path / "lock", ME)
        former.note(process.pid)
        former.close()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            os.sched_yield()
        claimed(tmp_path / "lock")
        assert process.poll() == -signal.SIGKILL, "it has ended by the time that the claim is taken"


def test_a_process_that_was_started_just_before_its_owner_ended_is_known_by_its_environment(tmp_path: Path) -> None:
    with started(WAITING, **{OWNER: ME}) as process, started(WAITING, **{OWNER: "another"}) as other:
        claimed(tmp_path / "lock")
        assert process.poll() == -signal.SIGKILL
        assert other.poll() is None


def test_a_process_that_has_got_the_number_of_a_former_one_is_let_be(tmp_path: Path) -> None:
    with started(WAITING) as process:
        session = Session.of(process.pid)
        assert session is not None
        (tmp_path / "lock").write_text(f"{session.leader} {session.started - 1}")
        claimed(tmp_path / "lock")
        assert process.poll() is None
        (tmp_path / "lock").write_text(f"{session.leader} {session.started}")
        claimed(tmp_path / "lock")
        assert process.poll() == -signal.SIGKILL, "and the same one, with its own time, is ended"


def test_a_process_that_is_reaped_as_it_is_about_to_be_killed_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(WAITING, **{OWNER: ME}) as process:
        send = signal.pidfd_send_signal

        def reaped_first(descriptor: int, number: signal.Signals) -> None:
            process.kill()
            process.wait()
            send(descriptor, number)

        monkeypatch.setattr(signal, "pidfd_send_signal", reaped_first)
        claimed(tmp_path / "lock")
