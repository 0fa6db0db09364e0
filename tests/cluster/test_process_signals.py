"""A signal before a process serves ends it at once, even as process 1; then the first one drains and a second one ends
it at once, as does the time a drain may take. Health follows."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_cluster import greedy
from lone_process import (
    DECODE,
    PREFILL,
    ROUTER,
    UP,
    as_process_1,
    child_of,
    command,
    endless_router,
    process,
)
from probing import health_flags, served, until_served
from proofs import operators_proof

from pdserve.launch.folder import ClusterState, write_secret
from pdserve.launch.plan import PDSERVE, flag_arguments
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.signals import DRAIN_TIMED_OUT_STATUS, SAME_REQUEST_S, Request, StopRequests

AT_ONCE_S = 10  # a busy machine; a drain would take longer
LONG = {"drain_timeout_s": 120.0}
POLICY = Path(__file__).parents[2] / "deploy/policies/batch.yaml"


@pytest.fixture
def endless_model(tmp_path: Path) -> Path:
    """A model that is read for ever: its configuration is a pipe."""
    folder = tmp_path / "endless"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    return folder


@contextmanager
def loading(model: Path) -> Iterator[None]:
    """Wait until a process reads the model's configuration, and keep it reading for the length of the block."""
    with (model / "config.json").open("wb", buffering=0):  # opens when a reader has opened
        yield


def ends(running: subprocess.Popen[str]) -> int:
    """Wait for a process that must end at once."""
    return running.wait(AT_ONCE_S)


def insist(running: subprocess.Popen[str], number: signal.Signals) -> int:
    """Signal a process that drains a second time, later than it takes the first one for; it must end at once."""
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(SAME_REQUEST_S)
    running.send_signal(number)
    return ends(running)


@pytest.mark.parametrize(
    "kind", [pytest.param(ROUTER, marks=pytest.mark.long), PREFILL, pytest.param(UP, marks=pytest.mark.long)]
)
def test_a_signal_while_the_model_loads_ends_the_process_which_has_not_started(
    kind: str, endless_model: Path, tmp_path: Path
) -> None:
    health = {} if kind == UP else health_flags()
    with process(command(kind, tmp_path / "run", endless_model, **health), tmp_path) as running, loading(endless_model):
        if kind == PREFILL:
            until_served(health["health_port"], ["live"])
        running.send_signal(signal.SIGINT)
        assert ends(running) == 128 + signal.SIGINT


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in (ROUTER, UP)), DECODE])
def test_process_1_of_a_container_heeds_a_signal_while_its_model_loads(
    kind: str, endless_model: Path, tmp_path: Path
) -> None:
    arguments = as_process_1(command(kind, tmp_path / "run", endless_model))
    with process(arguments, tmp_path) as running, loading(endless_model):
        os.kill(child_of(running), signal.SIGTERM)
        assert ends(running) == 128 + signal.SIGTERM


def test_a_signal_that_comes_twice_is_one_request() -> None:
    requests = StopRequests()
    received = [requests.receive(now_s) for now_s in (7.0, 7.0 + 0.9 * SAME_REQUEST_S, 7.0 + SAME_REQUEST_S)]
    assert received == [Request.FIRST, Request.SAME, Request.SECOND]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("end_on_signals(); os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("end_after(0.0)", DRAIN_TIMED_OUT_STATUS),
    ],
)
def test_a_process_ends_though_its_log_takes_nothing_more(code: str, status: int) -> None:
    program = f"import os, signal; from pdserve.signals import *; {code}; signal.pause()"
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen([sys.executable, "-P", "-c", program], stderr=full) as p,
    ):
        try:
            assert p.wait(AT_ONCE_S) == status
        finally:
            p.kill()


def test_a_router_drains_at_the_first_signal_and_ends_at_the_second(model: Path, tmp_path: Path) -> None:
    with process(command(ROUTER, tmp_path / "run", model, pool_grace_s=120.0, **LONG), tmp_path) as running:
        public, internal = (until_said(running, what).rsplit(maxsplit=1)[1] for what in ("serving ", "workers on "))
        with grpc.insecure_channel(public) as channel:
            held = InferenceServiceStub(channel).Generate(greedy([3, 4, 5], 4), wait_for_ready=True)
            until_held(internal, tmp_path / "run" / "secret")
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            running.send_signal(signal.SIGTERM)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert insist(running, signal.SIGTERM) == 128 + signal.SIGTERM
            assert held.code() is grpc.StatusCode.UNAVAILABLE


def test_a_router_that_has_not_drained_in_time_says_so_by_its_exit_status(model: Path, tmp_path: Path) -> None:
    flags = {"pool_grace_s": 120.0, "drain_timeout_s": 0.2}
    with process(command(ROUTER, tmp_path / "run", model, **flags), tmp_path) as running:
        public, internal = (until_said(running, what).rsplit(maxsplit=1)[1] for what in ("serving ", "workers on "))
        with grpc.insecure_channel(public) as channel:
            held = InferenceServiceStub(channel).Generate(greedy([3, 4, 5], 4), wait_for_ready=True)
            until_held(internal, tmp_path / "run" / "secret")
            running.send_signal(signal.SIGTERM)
            assert held.code() is grpc.StatusCode.UNAVAILABLE
            assert ends(running) == DRAIN_TIMED_OUT_STATUS


def test_a_worker_drains_at_the_first_signal_and_ends_at_the_second(model: Path, tmp_path: Path) -> None:
    with endless_router(tmp_path / "run" / "secret") as (router, address):
        message = tmp_path / "termination-log"
        own = {"launch_id": "6f1c-pod", "termination_message_file": message}
        flags = {"routers": (address,), "lease_s": 600.0, **LONG, **own, **health_flags()}
        with process(command(DECODE, tmp_path / "run", model, **flags), tmp_path) as running:
            assert router.holds_request.wait(90)
            assert served(flags["health_port"]) == ["live", "started", "ready"]
            trial = router.registered.trial_steps
            assert any(step.prefill_tokens for step in trial)
            assert any(step.decode_sequences and step.elapsed_us for step in trial)
            assert (router.registered.launch_id, router.registered.incarnation) == (
                "6f1c-pod",
                int(message.read_text()),
            )
            running.send_signal(signal.SIGTERM)
            assert router.drains.wait(AT_ONCE_S)
            assert served(flags["health_port"]) == ["live", "started"]
            assert insist(running, signal.SIGINT) == 128 + signal.SIGINT


def test_a_worker_that_attaches_to_no_router_is_not_ready_and_ends_as_one_that_has_drained(
    model: Path, tmp_path: Path
) -> None:
    flags = health_flags()
    with process(command(DECODE, tmp_path / "run", model, **flags), tmp_path) as running:
        until_served(flags["health_port"], ["live", "started"])
        running.send_signal(signal.SIGTERM)
        assert ends(running) == 0


def test_an_autoscaler_ends_after_its_step(tmp_path: Path) -> None:
    flags = {"policy": POLICY, "routers": ("127.0.0.1:1",), "secret_file": write_secret(tmp_path), **health_flags()}
    with process([*PDSERVE, "autoscale", "run", *flag_arguments(flags)], tmp_path) as running:
        until_served(flags["health_port"], ["live", "started", "ready"])
        running.send_signal(signal.SIGTERM)
        assert ends(running) == 0


def test_a_worker_that_has_not_drained_in_time_ends(model: Path, tmp_path: Path) -> None:
    with endless_router(tmp_path / "run" / "secret") as (router, address):
        flags = {"routers": (address,), "lease_s": 600.0, "drain_timeout_s": 0.5}
        with process(command(DECODE, tmp_path / "run", model, **flags), tmp_path) as running:
            assert router.holds_request.wait(90)
            running.send_signal(signal.SIGTERM)
            assert ends(running) == DRAIN_TIMED_OUT_STATUS


def test_a_cluster_drains_at_the_first_signal_and_is_killed_at_the_second(model: Path, tmp_path: Path) -> None:
    with process(command(UP, tmp_path / "run", model, num_threads=1, **LONG), tmp_path) as running:
        until_said(running, "ready: ")
        (state_file,) = tmp_path.glob("pdserve/*/state.json")
        state = ClusterState.model_validate_json(state_file.read_text())
        decode = state.pid_of("decode-0")
        assert decode is not None
        os.kill(decode, signal.SIGSTOP)  # it cannot drain
        running.send_signal(signal.SIGTERM)
        until_said(running, "stopping: ")
        assert insist(running, signal.SIGINT) == 128 + signal.SIGINT
    assert not state.secret_file.exists()
    assert not any(process.pid is not None and psutil.pid_exists(process.pid) for process in state.processes)


def until_held(internal: str, secret_file: Path) -> None:
    """Wait until a router has said that it holds a request."""
    with grpc.insecure_channel(internal) as channel:
        proof = operators_proof(channel, secret_file, "WatchStatus")
        watch = AdminServiceStub(channel).WatchStatus(admin.WatchStatusRequest(), metadata=proof)
        assert any(reply.status.num_active or reply.status.num_held for reply in watch)
        watch.cancel()


def until_said(running: subprocess.Popen[str], part: str) -> str:
    """Wait for a line on stderr and return it; what comes after it is read and dropped."""
    assert running.stderr is not None
    said = next((line for line in iter(running.stderr.readline, "") if part in line), None)
    assert said is not None, f"ended before it said {part!r}"
    if part.startswith(("stopping", "workers on")):
        threading.Thread(target=running.stderr.read, daemon=True).start()
    return said
