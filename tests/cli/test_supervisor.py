"""No child outlives its supervisor, none stays dead, and each end is announced once, as soon as it is known."""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
from supervised_children import Record, supervised

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import CommandError, ConfigError
from pdserve.launch import supervisor as supervisor_module
from pdserve.launch.folder import ProcessState
from pdserve.launch.plan import ChildSpec, ProcessRole
from pdserve.launch.supervisor import Backoff, ChildExit, Stage, Supervisor

pytestmark = pytest.mark.slow

AT_ONCE = Backoff(first_s=0.0, longest_s=0.0)
SLEEP = "import signal; signal.pause()"
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def child(name: str, code: str, role: ProcessRole = "decode") -> ChildSpec:
    return ChildSpec(name, role, (sys.executable, "-I", "-c", code))


def telling_child(folder: Path, name: str, role: ProcessRole, *, first: str = "") -> ChildSpec:
    """Return a child that writes its arguments into a pipe once it is set up, then sleeps."""
    pipe = folder / f"{name}.pipe"
    os.mkfifo(pipe)
    return child(name, f"import sys; {first}\nopen({str(pipe)!r}, 'w').write(repr(sys.argv[1:]))\n{SLEEP}", role)


async def told(folder: Path, name: str) -> str:
    """Return what the child wrote, once it has."""
    return await asyncio.to_thread((folder / f"{name}.pipe").read_text)


def pids(processes: tuple[ProcessState, ...]) -> list[int]:
    return [process.pid for process in processes if process.pid is not None]


async def test_a_child_that_dies_is_announced_and_started_again_as_another_incarnation(tmp_path: Path) -> None:
    supervisor = Supervisor([child("decode-0", SLEEP)], tmp_path, MonotonicClock(), backoff=AT_ONCE)
    record = Record()
    async with supervised(supervisor, record):
        await record.until(lambda: record.num_starts == 1)
        (before,) = supervisor.processes
        assert before.pid is not None
        psutil.Process(before.pid).kill()
        await record.until(lambda: record.num_starts == 2)
        (after,) = supervisor.processes
        (exit_,) = record.exits
        assert (exit_.spec.name, exit_.incarnation, exit_.status) == ("decode-0", before.incarnation, -signal.SIGKILL)
        assert after.incarnation not in (0, before.incarnation)
        assert after.pid not in (None, before.pid)


async def test_a_child_that_others_kill_does_not_wait_longer_each_time(tmp_path: Path) -> None:
    backoff = Backoff(first_s=0.01, longest_s=100.0, healthy_s=1000.0)
    supervisor = Supervisor([child("decode-0", SLEEP)], tmp_path, MonotonicClock(), backoff=backoff)
    record = Record()
    async with supervised(supervisor, record):
        for number in range(1, 4):
            await record.until(lambda number=number: record.num_starts == number)
            (process,) = supervisor.processes
            assert process.pid is not None
            psutil.Process(process.pid).kill()
        await record.until(lambda: len(record.exits) == 3)
    assert [exit_.restart_in_s for exit_ in record.exits] == [0.01] * 3


class Looking(Record):
    """Notes of each process that is announced whether another one was still there."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.found = 0, list[bool]()

    def on_exit(self, exit_: ChildExit) -> None:
        self.found.append(psutil.pid_exists(self.other))
        super().on_exit(exit_)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans another parent")
async def test_an_end_is_announced_once_all_that_the_process_has_started_has_ended(tmp_path: Path) -> None:
    """As the ranks of a worker, each of which writes into pages of others."""
    pipe = tmp_path / "rank.pipe"
    os.mkfifo(pipe)
    rank = f"{IGNORE_TERM}; import os; open({str(pipe)!r}, 'w').write(str(os.getpid())); {SLEEP}"
    leader = f"import subprocess, sys; subprocess.Popen([sys.executable, '-I', '-c', {rank!r}]); {SLEEP}"
    supervisor = Supervisor([child("decode-0", leader)], tmp_path, MonotonicClock(), backoff=AT_ONCE)
    record = Looking()
    async with supervised(supervisor, record):
        record.other = int(await told(tmp_path, "rank"))
        assert psutil.pid_exists(record.other)
        (process,) = supervisor.processes
        assert process.pid is not None
        psutil.Process(process.pid).kill()
        await record.until(lambda: bool(record.exits))
    assert record.found[0] is False


async def test_a_group_that_does_not_end_is_told_and_waited_for_also_when_all_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, warned = threading.Event(), asyncio.Event()
    monkeypatch.setattr(supervisor_module, "SLOW_END_S", 0.01)
    monkeypatch.setattr(supervisor_module, "end_group", lambda _number: over.wait())
    monkeypatch.setattr(supervisor_module.logger, "warning", lambda *_: warned.set())
    supervisor, record = Supervisor([child("decode-0", SLEEP)], tmp_path, MonotonicClock(), backoff=AT_ONCE), Record()
    running = asyncio.create_task(supervisor.run(record.on_exit, record.on_start))
    await record.until(lambda: record.num_starts == 1)
    (process,) = supervisor.processes
    assert process.pid is not None
    psutil.Process(process.pid).kill()
    await warned.wait()
    running.cancel()
    assert await asyncio.wait((running,), timeout=0.1) == (set(), {running})
    assert not record.exits
    over.set()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_incarnation_is_told_to_workers_and_not_to_the_router(tmp_path: Path) -> None:
    children = [telling_child(tmp_path, "router", "router"), telling_child(tmp_path, "prefill-0", "prefill")]
    supervisor = Supervisor(children, tmp_path, MonotonicClock())
    record = Record()
    async with supervised(supervisor, record):
        await record.until(lambda: record.num_starts == 2)
        router, prefill = supervisor.processes
        assert await told(tmp_path, "router") == "[]"
        assert await told(tmp_path, "prefill-0") == f"['--incarnation', '{prefill.incarnation}']"
        assert router.incarnation != prefill.incarnation


async def test_stopping_goes_stage_by_stage_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    children = [
        telling_child(tmp_path, "router", "router"),
        telling_child(tmp_path, "prefill-0", "prefill", first=IGNORE_TERM),
        telling_child(tmp_path, "decode-0", "decode"),
    ]
    supervisor = Supervisor(children, tmp_path, MonotonicClock())
    record = Record()
    async with supervised(supervisor, record):
        for name in ("router", "prefill-0", "decode-0"):
            await told(tmp_path, name)
        await supervisor.stop((Stage(("router",), 20.0), Stage(("prefill", "decode"), 4.0)))
        await record.until(lambda: len(record.exits) == 3)
    ends = {exit_.spec.role: exit_.status for exit_ in record.exits}
    assert ends == {"router": -signal.SIGTERM, "prefill": -signal.SIGKILL, "decode": -signal.SIGTERM}
    assert record.exits[0].spec.role == "router"
    assert [exit_.restart_in_s for exit_ in record.exits] == [None, None, None]
    assert pids(supervisor.processes) == []


async def test_a_child_that_refuses_its_configuration_ends_all_and_is_quoted(tmp_path: Path) -> None:
    refuse = "import sys; print('pdserve: --page-size: 0 is refused', file=sys.stderr); sys.exit(2)"
    children = [child("prefill-0", refuse, "prefill"), child("decode-0", SLEEP)]
    supervisor = Supervisor(children, tmp_path, MonotonicClock())
    with pytest.raises(ExceptionGroup) as caught:
        await supervisor.run(lambda _exit: None, lambda: None)
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert str(error) == "prefill-0 refuses its configuration: pdserve: --page-size: 0 is refused"
    assert pids(supervisor.processes) == []


async def test_a_child_that_once_ran_is_started_again_whatever_it_says(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"import pathlib, sys; mark = pathlib.Path({str(mark)!r}); first = not mark.exists(); mark.touch()\n"
    supervisor = Supervisor(
        [child("decode-0", code + "sys.exit(1 if first else 2)")], tmp_path, MonotonicClock(), backoff=AT_ONCE
    )
    record = Record()
    async with supervised(supervisor, record):
        await record.until(lambda: record.num_starts == 3)
        assert [exit_.status for exit_ in record.exits[:2]] == [1, 2]


async def test_cancelling_leaves_no_child(tmp_path: Path) -> None:
    supervisor = Supervisor([child("decode-0", SLEEP)], tmp_path, MonotonicClock())
    record = Record()
    run = asyncio.create_task(supervisor.run(record.on_exit, record.on_start))
    await record.until(lambda: record.num_starts == 1)
    (pid,) = pids(supervisor.processes)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
async def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    parent_code = (
        "import os, subprocess, sys\n"
        "wrapper = [sys.executable, '-P', '-m', 'pdserve.base.signals', str(os.getpid())]\n"
        f"child = subprocess.Popen([*wrapper, sys.executable, '-I', '-c', 'print(1, flush=True); {SLEEP}'],"
        " stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline(), flush=True)\n"
        "child.wait()\n"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", parent_code),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    await parent.stdout.readline()
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(20):
        assert await parent.stderr.read() == b""  # ends when the last process that holds it has ended


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1.0, longest_s=30.0, healthy_s=60.0)
    delays: list[float] = []
    for _ in range(7):
        delays.append(backoff.next_delay_s(delays[-1] if delays else None, ran_s=0.1))
    assert delays == [1, 2, 4, 8, 16, 30, 30]


def test_a_minute_of_health_forgives_what_was_before() -> None:
    backoff = Backoff(first_s=1.0, longest_s=30.0, healthy_s=60.0)
    assert backoff.next_delay_s(16.0, ran_s=59.9) == 30.0
    assert backoff.next_delay_s(16.0, ran_s=60.0) == 1.0


async def test_a_child_added_while_others_run_is_kept_until_it_is_retired(tmp_path: Path) -> None:
    supervisor = Supervisor([child("decode-0", SLEEP)], tmp_path, MonotonicClock(), backoff=AT_ONCE)
    record = Record()
    async with supervised(supervisor, record):
        await record.until(lambda: record.num_starts == 1)
        supervisor.add(child("decode-1", SLEEP))
        await record.until(lambda: record.num_starts == 2)
        (added,) = (process for process in supervisor.processes if process.name == "decode-1")
        assert added.pid is not None
        psutil.Process(added.pid).kill()
        await record.until(lambda: record.num_starts == 3)
        supervisor.retire("decode-1", 20.0)
        assert [process.leaving for process in supervisor.processes] == [False, True]
        await record.until(lambda: len(supervisor.processes) == 1)
        killed, left = record.exits
        assert killed.restart_in_s is not None
        assert (left.spec.name, left.status, left.restart_in_s) == ("decode-1", -signal.SIGTERM, None)
        supervisor.add(child("decode-1", SLEEP))  # its name is free again
        await record.until(lambda: record.num_starts == 5)
        (again,) = (process for process in supervisor.processes if process.name == "decode-1")
        assert again.incarnation > left.incarnation > added.incarnation


async def test_a_retired_child_that_does_not_end_is_killed_after_its_limit(tmp_path: Path) -> None:
    children = [child("decode-0", SLEEP), telling_child(tmp_path, "decode-1", "decode", first=IGNORE_TERM)]
    supervisor = Supervisor(children, tmp_path, MonotonicClock(), backoff=AT_ONCE)
    record = Record()
    async with supervised(supervisor, record):
        await told(tmp_path, "decode-1")
        supervisor.retire("decode-1", 0.05)
        await record.until(lambda: len(record.exits) == 1)
        (exit_,) = record.exits
        assert (exit_.spec.name, exit_.status, exit_.restart_in_s) == ("decode-1", -signal.SIGKILL, None)


async def test_a_child_retired_while_it_waits_for_its_next_start_is_not_started(tmp_path: Path) -> None:
    backoff = Backoff(first_s=1000.0, longest_s=1000.0)
    supervisor = Supervisor(
        [child("decode-0", SLEEP), child("decode-1", "")], tmp_path, MonotonicClock(), backoff=backoff
    )
    record = Record()
    async with supervised(supervisor, record):
        await record.until(lambda: len(record.exits) == 1)
        supervisor.retire("decode-1", 20.0)
        await record.until(lambda: len(supervisor.processes) == 1)
        assert [exit_.restart_in_s for exit_ in record.exits] == [1000.0]


async def test_an_added_child_that_refuses_its_configuration_ends_alone(tmp_path: Path) -> None:
    supervisor = Supervisor([child("decode-0", SLEEP)], tmp_path, MonotonicClock(), backoff=AT_ONCE)
    record = Record()
    async with supervised(supervisor, record):
        await record.until(lambda: record.num_starts == 1)
        supervisor.add(child("decode-1", "raise SystemExit(2)"))
        await record.until(lambda: len(record.exits) == 1 and len(supervisor.processes) == 1)
        assert record.exits[0].restart_in_s is None
        assert [process.name for process in supervisor.processes] == ["decode-0"]
        assert pids(supervisor.processes) != []


async def test_a_child_that_drains_is_not_asked_again_when_all_stop(tmp_path: Path) -> None:
    pipe = tmp_path / "asked.pipe"
    os.mkfifo(pipe)
    count = (
        f"import signal; signal.signal(15, lambda *_: (print('asked', flush=True), open({str(pipe)!r}, 'w').close()))"
    )
    spec = telling_child(tmp_path, "decode-0", "decode", first=count)
    children = [child("decode-0", spec.command[-1].replace(SLEEP, "while True: signal.pause()"))]
    supervisor = Supervisor(children, tmp_path, MonotonicClock(), backoff=AT_ONCE)
    record = Record()
    async with supervised(supervisor, record):
        await told(tmp_path, "decode-0")
        supervisor.retire("decode-0", 20.0)
        await told(tmp_path, "asked")
        await supervisor.stop((Stage(("decode",), 0.3),))
        await record.until(lambda: len(record.exits) == 1)
    assert supervisor.log_file("decode-0").read_text() == "asked\n"


def test_nothing_is_added_once_all_stop(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="stopping"):
        Supervisor([], tmp_path, MonotonicClock()).add(child("decode-0", SLEEP))
