"""What it takes to tell operators the state of a cluster."""

import asyncio
import sys
from pathlib import Path
from types import FrameType

import pytest
from router_fakes import StartRouter

from pdserve.base.clock import VirtualClock
from pdserve.base.ids import PROTOCOL_VERSION, Incarnation, WorkerId
from pdserve.base.roles import Role
from pdserve.doctor.cluster import asked
from pdserve.doctor.machine import Level
from pdserve.net.operator_client import AdminClient
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.router.admin import AdminEndpoint
from pdserve.router.config import Limits
from pdserve.router.placement.policies import least_loaded
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import Registration
from pdserve.router.shell import Shell

LAYOUT = KvLayout("w", 1, 1, 8, 16, "float32")


def cluster_of(num_pairs: int) -> AdminEndpoint:
    """Return the endpoint of a router whose prefill workers have all measured their way to all decode workers."""
    shell = Shell(RouterCore("m", Limits(), least_loaded), VirtualClock())
    for role, letter in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
        for number in range(num_pairs):
            stream, name = shell.open_stream(None), WorkerId(f"{letter}{number}")
            process = stream.link_id, name, Incarnation(1), role
            told = Registration(*process, PROTOCOL_VERSION, True, "m", LAYOUT, 100, 8, 1024, name, 2048)
            shell.post(told)
            if role is Role.PREFILL:
                stream.pairs = {f"d{i}": link.PairMeasured(decode_worker_id=f"d{i}") for i in range(num_pairs)}
    return AdminEndpoint(shell, "r", "m")


async def status_and_calls(endpoint: AdminEndpoint) -> tuple[admin.ClusterStatus, int]:
    """Return the state, and how many functions were called, and generators resumed, to tell it."""
    num_calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        reply = await endpoint.GetStatus(admin.GetStatusRequest(), None)
    finally:
        sys.setprofile(None)
    return reply.status, num_calls


@pytest.mark.parametrize("num_pairs", [16])
async def test_the_work_of_a_status_grows_with_the_workers_and_not_with_their_square_or_cube(num_pairs: int) -> None:
    small, num_calls = await status_and_calls(cluster_of(num_pairs))
    large, num_more = await status_and_calls(cluster_of(4 * num_pairs))
    assert [len(worker.pairs) for worker in small.workers] == [num_pairs] * num_pairs + [0] * num_pairs
    assert not any(worker.unroutable for worker in large.workers)
    assert num_more < 5 * num_calls


async def test_doctor_reads_a_routers_state_and_its_clock(start_router: StartRouter, secret_file: Path) -> None:
    router = await start_router()
    found = {
        finding.name: finding
        for finding in await asked(AdminClient(router.addresses.internal, secret_file), None, None)
    }
    assert found["clocks"].level is Level.OK
    assert (found["workers"].level, found["workers"].seen) == (Level.FAILED, "none is attached to router")


async def test_doctor_says_that_a_router_does_not_answer(secret_file: Path) -> None:
    (finding,) = await asked(AdminClient("127.0.0.1:1", secret_file), None, None)
    assert (finding.name, finding.level) == ("router", Level.FAILED)


@pytest.mark.parametrize(
    "words",
    [
        ("drain", "nosuch"),
        pytest.param(("undrain", "nosuch"), marks=pytest.mark.long),
        pytest.param(("role", "nosuch", "mixed"), marks=pytest.mark.long),
    ],
)
async def test_a_command_for_a_worker_that_is_not_there_says_which_are(
    start_router: StartRouter, secret_file: Path, words: tuple[str, ...]
) -> None:
    router = await start_router()
    await router.pair()
    flags = ("--admin", router.addresses.internal, "--secret-file", str(secret_file))
    command = (sys.executable, "-P", "-m", "pdserve", *words, *flags)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    names = ", ".join(sorted(router.workers))
    text = f"pdserve: WORKER: 'nosuch' is not attached to the router; its workers: {names}\n"
    assert (process.returncode, said.decode()) == (2, text)
