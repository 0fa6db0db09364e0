"""Workers come and go by order, once each, in the number that may be; each end is the launcher's to announce."""

import signal
from pathlib import Path

import grpc
import pytest
from sleeping_cluster import SLEEPER, deaf_workers, let_workers_run, sleeping_cluster

from pdserve.base.roles import Role
from pdserve.launch.folder import write_secret
from pdserve.net.operator_client import LauncherClient
from pdserve.proto.v1 import launcher_pb2 as launcher
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.launcher_pb2_grpc import LauncherServiceStub

pytestmark = pytest.mark.slow

STARTING, READY = launcher.WORKER_STATE_STARTING, launcher.WORKER_STATE_READY
DRAINING = launcher.WORKER_STATE_DRAINING


@pytest.fixture(autouse=True)
def _sleeping_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_run(SLEEPER, monkeypatch)


async def test_workers_come_and_go_while_the_others_stay(tmp_path: Path) -> None:
    async with sleeping_cluster(tmp_path, 3) as stage:
        stage.ready |= {"prefill-0", "decode-0"}
        assert await stage.states() == {"prefill-0": READY, "decode-0": READY}
        await stage.client.start_worker("decode-1", Role.DECODE)
        assert await stage.states() == {"prefill-0": READY, "decode-0": READY, "decode-1": STARTING}
        await stage.record.until(lambda: stage.record.num_starts == 4)
        stage.ready.add("decode-1")
        await stage.client.stop_worker("decode-1")
        await stage.record.until(lambda: bool(stage.record.exits))
        (exit_,) = stage.record.exits
        assert (exit_.spec.name, exit_.status, exit_.restart_in_s) == ("decode-1", -signal.SIGTERM, None)
        assert await stage.states() == {"prefill-0": READY, "decode-0": READY}


async def test_an_order_repeated_starts_nothing_twice_and_stops_once(tmp_path: Path) -> None:
    async with sleeping_cluster(tmp_path, 3) as stage:
        with deaf_workers():
            for _ in range(3):
                await stage.client.start_worker("decode-1", Role.DECODE)
            await stage.record.until(lambda: stage.record.num_starts == 4)
        (process,) = (each for each in stage.supervisor.processes if each.name == "decode-1")
        await stage.client.stop_worker("decode-1")
        await stage.client.stop_worker("decode-1")
        assert (await stage.states())["decode-1"] == DRAINING
        with pytest.raises(grpc.aio.AioRpcError, match="decode-1 is still draining") as refused:
            await stage.client.start_worker("decode-1", Role.DECODE)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert [each.incarnation for each in stage.supervisor.processes if each.name == "decode-1"] == [
            process.incarnation
        ]


async def test_more_workers_than_may_be_are_refused_until_one_has_left(tmp_path: Path) -> None:
    async with sleeping_cluster(tmp_path, 3) as stage:
        await stage.client.start_worker("prefill-1", Role.PREFILL)
        with pytest.raises(grpc.aio.AioRpcError, match="--max-workers: 3 are there") as refused:
            await stage.client.start_worker("prefill-2", Role.PREFILL)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stage.client.stop_worker("prefill-1")
        await stage.record.until(lambda: len(stage.supervisor.processes) == 3)
        await stage.client.start_worker("prefill-2", Role.PREFILL)
        assert "prefill-2" in await stage.states()


@pytest.mark.parametrize(
    ("name", "role", "code"),
    [
        ("", link.ROLE_DECODE, grpc.StatusCode.INVALID_ARGUMENT),
        ("../../x", link.ROLE_DECODE, grpc.StatusCode.INVALID_ARGUMENT),
        ("router", link.ROLE_DECODE, grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 128, link.ROLE_DECODE, grpc.StatusCode.INVALID_ARGUMENT),
        ("decode-1", link.ROLE_UNSPECIFIED, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_worker_that_cannot_be_is_refused(
    tmp_path: Path, name: str, role: "link.Role.ValueType", code: grpc.StatusCode
) -> None:
    async with sleeping_cluster(tmp_path, 3) as stage:
        request = launcher.StartWorkerRequest(worker_id=name, role=role)
        async with stage.client.calling("LauncherService/StartWorker") as (channel, proof):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await LauncherServiceStub(channel).StartWorker(request, metadata=proof)
        assert refused.value.code() is code
        assert len(stage.supervisor.processes) == 3


async def test_only_workers_are_stopped(tmp_path: Path) -> None:
    async with sleeping_cluster(tmp_path, 3) as stage:
        for name in ("router", "decode-9"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stage.client.stop_worker(name)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_caller_without_the_secret_is_refused(tmp_path: Path) -> None:
    async with sleeping_cluster(tmp_path, 3) as stage:
        other = tmp_path / "other"
        other.mkdir()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await LauncherClient(stage.address, write_secret(other)).start_worker("decode-1", Role.DECODE)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await stage.states() == {"prefill-0": STARTING, "decode-0": STARTING}
