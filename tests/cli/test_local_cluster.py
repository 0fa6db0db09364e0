"""A worker's death is reported to the router at once, with the incarnation that died; the state file follows."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cluster_states import cluster_state

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import ConfigError
from pdserve.launch.folder import (
    ClusterState,
    claimed_folder,
    claimed_port,
    drained_file,
    free_port,
    read_state,
    runtime_dir,
    write_secret,
)
from pdserve.launch.local import LaunchError, Listener, LocalCluster
from pdserve.launch.plan import ChildSpec
from pdserve.launch.supervisor import Backoff, Supervisor
from pdserve.net import rpc
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server

HOST = "127.0.0.1"
SLEEPER = (sys.executable, "-I", "-c", "import signal; signal.pause()")
FAILURE = (sys.executable, "-I", "-c", "raise SystemExit('out of luck')")


class Operators(AdminServiceServicer):
    """A router's admin service: notes which processes are reported gone, and shows the workers it is told of."""

    def __init__(self) -> None:
        self.gone: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self.status = admin.ClusterStatus()
        self.changed = asyncio.Event()
        self.fails = False

    async def ReportProcessGone(  # noqa: N802
        self, request: admin.ReportProcessGoneRequest, context: object
    ) -> admin.ReportProcessGoneResponse:
        del context
        process = request.process
        await self.gone.put((process.worker_id, process.incarnation))
        return admin.ReportProcessGoneResponse()

    async def WatchStatus(  # noqa: N802
        self,
        request: admin.WatchStatusRequest,
        context: "grpc.aio.ServicerContext[admin.WatchStatusRequest, admin.WatchStatusResponse]",
    ) -> AsyncIterator[admin.WatchStatusResponse]:
        del request
        while True:
            if self.fails:
                self.fails = False
                await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")
            self.changed.clear()
            yield admin.WatchStatusResponse(status=self.status)
            await self.changed.wait()

    def GetStatus(self, request: object, context: object) -> admin.GetStatusResponse:  # noqa: N802
        del request, context
        return admin.GetStatusResponse(status=self.status)

    def DrainWorker(self, request: object, context: object) -> admin.DrainWorkerResponse:  # noqa: N802
        raise NotImplementedError

    def show_ready(self, state: ClusterState) -> None:
        """Let all workers of `state` appear with their models loaded."""
        self.status = admin.ClusterStatus(
            workers=[
                admin.WorkerStatus(registration=link.Register(worker_id=p.name, incarnation=p.incarnation, ready=True))
                for p in state.processes
            ]
        )
        self.changed.set()


@dataclass
class Scene:
    cluster: LocalCluster
    supervisor: Supervisor
    operators: Operators
    notices: list[str]
    heard: asyncio.Event  # the cluster has been told of workers


@asynccontextmanager
async def scene(*children: ChildSpec, backoff: Backoff | None = None) -> AsyncIterator[Scene]:
    """Run children under a real admin service, in the folder of the cluster `tests`."""
    with claimed_folder("tests") as folder:
        secret_file = write_secret(folder)
        operators = Operators()
        server = grpc.aio.server(interceptors=[rpc.RequireSecret(rpc.read_secret(secret_file))])
        add_AdminServiceServicer_to_server(operators, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        state = cluster_state(secret_file, admin=f"127.0.0.1:{port}", ready=False)
        notices: list[str] = []
        heard = asyncio.Event()

        def on_status(status: admin.ClusterStatus) -> None:
            if status.workers:
                heard.set()

        listener = Listener(on_status=on_status, on_notice=notices.append)
        supervisor = Supervisor(children, folder / "logs", MonotonicClock(), backoff=backoff)
        cluster = LocalCluster(state, supervisor, listener)
        try:
            async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
                supervising = tasks.create_task(cluster.supervise())
                yield Scene(cluster, supervisor, operators, notices, heard)
                cluster.kill()
                await supervising
        finally:
            await server.stop(None)


@pytest.fixture(autouse=True)
def private_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


async def running_children(stage: Scene) -> None:
    """Let the children start, which is a matter of a few turns of the loop."""
    while not all(process.pid for process in stage.cluster.state.processes):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def started(stage: Scene) -> ClusterState:
    """Wait until the children run and are shown as ready; return the state that other commands read."""
    await running_children(stage)
    stage.operators.show_ready(stage.cluster.state)
    await stage.cluster.ready.wait()
    return read_state("tests")


async def test_a_killed_worker_is_reported_before_it_starts_again_with_the_incarnation_that_died() -> None:
    workers = [ChildSpec("prefill-0", "prefill", SLEEPER), ChildSpec("decode-0", "decode", SLEEPER)]
    async with scene(*workers, backoff=Backoff(first_s=1000.0, longest_s=1000.0)) as stage:
        before = await started(stage)
        pid = before.pid_of("decode-0")
        assert pid is not None
        os.kill(pid, 9)
        assert await stage.operators.gone.get() == ("decode-0", before.processes[1].incarnation)
        assert stage.operators.gone.empty()
    assert "decode-0 ended with status -9; starting again in 1000 s" in stage.notices[0]


async def test_a_routers_death_is_not_reported_to_itself() -> None:
    async with scene(ChildSpec("router", "router", SLEEPER), ChildSpec("decode-0", "decode", SLEEPER)) as stage:
        before = await started(stage)
        for name in ("router", "decode-0"):
            pid = before.pid_of(name)
            assert pid is not None
            os.kill(pid, 9)
        worker_id, _ = await stage.operators.gone.get()
        assert worker_id == "decode-0"
        assert stage.operators.gone.empty()


async def test_a_retired_workers_end_is_reported_and_it_leaves_the_state() -> None:
    async with scene(ChildSpec("decode-0", "decode", SLEEPER), ChildSpec("decode-1", "decode", SLEEPER)) as stage:
        before = await started(stage)
        stage.supervisor.retire("decode-1", 20.0)
        assert await stage.operators.gone.get() == ("decode-1", before.processes[1].incarnation)
        assert [process.name for process in read_state("tests").processes] == ["decode-0"]
        assert stage.notices[0].startswith("decode-1 has ended with status -15 (log: ")


async def test_a_cluster_is_ready_when_the_running_incarnations_are() -> None:
    async with scene(ChildSpec("decode-0", "decode", SLEEPER)) as stage:
        state = await started(stage)
        assert state.ready
        assert state.model == "m"
        assert [(p.name, p.role, p.num_restarts) for p in state.processes] == [("decode-0", "decode", 0)]


async def test_a_cluster_that_serves_outlives_whatever_its_router_answers() -> None:
    async with scene(ChildSpec("decode-0", "decode", SLEEPER)) as stage:
        before = await started(stage)
        stage.operators.fails = True
        stage.operators.changed.set()
        stage.heard.clear()
        await stage.heard.wait()
        assert not stage.operators.fails
        assert read_state("tests") == before


@pytest.mark.parametrize(("status", "how", "drains"), [(0, "stop", True), (75, "stop", False), (0, "kill", False)])
async def test_a_cluster_has_drained_only_if_all_of_it_ended_well(
    tmp_path: Path, status: int, how: str, drains: bool
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit({status}))
open({str(pipe)!r}, "w").close()
while True: signal.pause()"""
    with claimed_folder("tests"):
        drained_file("tests").touch()  # of the run before
    async with scene(ChildSpec("decode-0", "decode", (sys.executable, "-I", "-c", code))) as stage:
        await asyncio.to_thread(pipe.read_text)
        assert not drained_file("tests").exists()
        if how == "stop":
            await stage.cluster.stop(10.0)
    assert drained_file("tests").exists() == drains


async def test_an_earlier_incarnation_does_not_make_a_cluster_ready() -> None:
    async with scene(ChildSpec("decode-0", "decode", SLEEPER)) as stage:
        await running_children(stage)
        stale = stage.cluster.state.processes[0].model_copy(update={"incarnation": 1})
        stage.operators.show_ready(stage.cluster.state.model_copy(update={"processes": (stale,)}))
        await stage.heard.wait()
        assert not stage.cluster.ready.is_set()


async def test_a_worker_that_never_starts_ends_the_cluster_and_names_its_log() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with scene(ChildSpec("decode-0", "decode", FAILURE), backoff=Backoff(0.0, 0.0)) as stage:
            await stage.cluster.ready.wait()
    failures = caught.value.subgroup(LaunchError)
    assert failures is not None
    assert str(leaf(failures)).startswith("decode-0 does not start (status 1): out of luck (log: ")


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def test_a_name_is_used_by_one_cluster_at_a_time_and_its_secret_is_private() -> None:
    with claimed_folder("one") as folder:
        secret = write_secret(folder)
        assert secret.stat().st_mode & 0o777 == 0o600
        assert len(rpc.read_secret(secret)) >= rpc.MIN_SECRET_BYTES
        with pytest.raises(ConfigError, match="'one' already runs"), claimed_folder("one"):
            pass
    assert not secret.exists()
    with claimed_folder("one"):
        assert runtime_dir("one") == folder


def test_a_clusters_secret_is_forgotten_when_it_fails_too() -> None:
    def fail() -> None:
        with claimed_folder("one") as folder:
            write_secret(folder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not (runtime_dir("one") / "secret").exists()


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b"])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        runtime_dir(name)


def test_a_cluster_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="pdserve up"):
        read_state("nobody")


def test_a_process_that_has_a_dead_launchers_number_is_no_cluster() -> None:
    with claimed_folder("one") as folder:
        state = cluster_state(folder / "secret").model_dump_json()
        (folder / "state.json").write_text(state)
        assert read_state("one").supervisor_pid == os.getpid()
    (folder / "state.json").write_text(state)  # as a launcher that was killed leaves it
    with pytest.raises(ConfigError, match="without cleaning up"):
        read_state("one")


async def test_a_cluster_serves_on_where_its_folder_is_gone() -> None:
    async with scene(ChildSpec("decode-0", "decode", SLEEPER), backoff=Backoff(first_s=0.0)) as stage:
        before = await started(stage)
        shutil.rmtree(runtime_dir("tests"))  # as when its user logs out
        pid = before.pid_of("decode-0")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await stage.operators.gone.get() == ("decode-0", before.processes[0].incarnation)
        while stage.cluster.state.pid_of("decode-0") in (None, pid):  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert any("state.json is not up to date: No such file" in notice for notice in stage.notices)


async def test_a_port_in_use_is_refused_when_asked_for_and_passed_over_when_preferred() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, HOST, 0)
    taken = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(ConfigError, match="the port is in use"), claimed_port(HOST, taken, 0):
            pass
        with claimed_port(HOST, None, taken) as port:
            assert port not in (0, taken)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell it elsewhere")
def test_a_free_port_is_none_that_the_system_gives_to_connections() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split())
    assert all(not first <= free_port(HOST) <= last for _ in range(20))


@pytest.mark.skipif(sys.platform != "linux", reason="claims are names that only Linux has")
def test_a_port_is_one_clusters_before_its_router_listens_and_anybodys_after_its_end() -> None:
    free = free_port(HOST)
    with claimed_port(HOST, None, free) as ours:
        assert ours == free
        with claimed_port(HOST, None, free) as other:
            assert other not in (0, free)
        with (
            pytest.raises(ConfigError, match=f"another cluster on this machine has {free} on {HOST}"),
            claimed_port(HOST, free, 0),
        ):
            pass
    with claimed_port(HOST, free, 0) as again:
        assert again == free
