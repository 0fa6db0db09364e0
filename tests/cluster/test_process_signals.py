"""A signal before a process serves ends it at once, even as process 1; then the first one drains and a second one ends
it at once, as does the time a drain may take. Health follows."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_cluster import Answer, greedy
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
from looking import until
from probing import health_flags, served, until_served
from proofs import operators_proof

from pdserve.base.processes import DRAIN_TIMED_OUT_STATUS
from pdserve.base.signals import SAME_REQUEST_S, Request, StopRequests
from pdserve.launch.folder import ClusterState, write_secret
from pdserve.launch.plan import PDSERVE, flag_arguments
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

AT_ONCE_S = 10  # a busy machine; a drain would take longer
SERVING = health_pb2.HealthCheckResponse.SERVING
NUM_TOKENS = 400
PTRACE_SEIZE = 0x4206
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


@pytest.mark.long
@pytest.mark.parametrize("kind", [ROUTER, PREFILL, UP])
def test_a_signal_while_the_model_loads_ends_the_process_which_has_not_started(
    kind: str, endless_model: Path, tmp_path: Path
) -> None:
    health = {} if kind == UP else health_flags()
    with process(command(kind, tmp_path / "run", endless_model, **health), tmp_path) as running, loading(endless_model):
        if kind == PREFILL:
            until_served(health["health_port"], ["live"])
        running.send_signal(signal.SIGINT)
        assert ends(running) == 128 + signal.SIGINT


@pytest.mark.parametrize("kind", [ROUTER, *(pytest.param(kind, marks=pytest.mark.long) for kind in (UP, DECODE))])
def test_process_1_of_a_container_heeds_a_signal_while_its_model_loads(
    kind: str, endless_model: Path, tmp_path: Path
) -> None:
    arguments = as_process_1(command(kind, tmp_path / "run", endless_model))
    with process(arguments, tmp_path) as running, loading(endless_model):
        os.kill(child_of(running), signal.SIGTERM)
        assert ends(running) == 128 + signal.SIGTERM


def test_a_signal_that_comes_twice_is_one_request() -> None:
    requests = StopRequests()
    times_s = (7.0, 7.0 + 0.9 * SAME_REQUEST_S, 7.0 + SAME_REQUEST_S)
    received = [requests.receive(now_s, signal.SIGTERM) for now_s in times_s]
    assert received == [Request.FIRST, Request.SAME, Request.SECOND]
    assert requests.receive(9.0, signal.SIGHUP) is Request.SAME, "a terminal that closes during a drain"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("end_on_signals(); os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM),
        ("end_after(0.0)", DRAIN_TIMED_OUT_STATUS),
    ],
)
def test_a_process_ends_though_its_log_takes_nothing_more(code: str, status: int) -> None:
    program = f"import os, signal; from pdserve.base.signals import *; {code}; signal.pause()"
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen([sys.executable, "-P", "-c", program], stderr=full) as p,
    ):
        try:
            assert p.wait(AT_ONCE_S) == status
        finally:
            p.kill()


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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_a_worker_that_has_not_drained_in_time_ends(model: Path, tmp_path: Path) -> None:
    with endless_router(tmp_path / "run" / "secret") as (router, address):
        flags = {"routers": (address,), "lease_s": 600.0, "drain_timeout_s": 0.5}
        with process(command(DECODE, tmp_path / "run", model, **flags), tmp_path) as running:
            assert router.holds_request.wait(90)
            running.send_signal(signal.SIGTERM)
            assert ends(running) == DRAIN_TIMED_OUT_STATUS


@contextmanager
def unreaped(pid: int) -> Iterator[None]:
    """Let no parent see the end of a process, as if that hung in a driver: its tracer, this thread, is told first."""
    if ctypes.CDLL(None).ptrace(*map(ctypes.c_long, (PTRACE_SEIZE, pid, 0, 0))):
        pytest.skip("needs ptrace")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        while os.WIFSTOPPED(os.waitpid(pid, 0)[1]):
            pass


@pytest.mark.parametrize("does_end", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_cluster_drains_at_the_first_signal_and_is_killed_at_the_second(
    model: Path, tmp_path: Path, does_end: bool
) -> None:
    with process(command(UP, tmp_path / "run", model, num_threads=1, **LONG), tmp_path) as running, ExitStack() as held:
        until_said(running, "ready: ")
        (state_file,) = tmp_path.glob("pdserve/*/state.json")
        state = ClusterState.model_validate_json(state_file.read_text())
        decode = state.pid_of("decode-0")
        assert decode is not None
        os.kill(decode, signal.SIGSTOP)  # it cannot drain
        if not does_end:
            held.enter_context(unreaped(decode))
        running.send_signal(signal.SIGTERM)
        until_said(running, "stopping: ")
        assert insist(running, signal.SIGINT) == 128 + signal.SIGINT
    assert state.secret_file.exists() != does_end
    pids = [each.pid for each in state.processes if each.pid is not None]
    until(lambda: not any(map(psutil.pid_exists, pids)), 5)


# ---- SIGHUP


def is_ignored(pid: int, number: signal.Signals) -> bool:
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool(int(fields["SigIgn"], 16) >> (number - 1) & 1)


@pytest.mark.long
def test_a_closing_terminal_cuts_no_stream_of_a_cluster(model: Path, tmp_path: Path) -> None:
    arguments = command(UP, tmp_path / "run", model, num_threads=1, drain_timeout_s=60.0)
    with process(arguments, tmp_path) as running:
        until_said(running, "ready: ")
        (state_file,) = tmp_path.glob("pdserve/*/state.json")
        state = ClusterState.model_validate_json(state_file.read_text())
        with grpc.insecure_channel(state.endpoint) as channel:
            call = InferenceServiceStub(channel).Generate(greedy([3, 4, 5], NUM_TOKENS))
            answer = Answer()
            answer.add(next(call))
            running.send_signal(signal.SIGHUP)
            until_said(running, "stopping: ")
            running.send_signal(signal.SIGHUP)  # shells send it as well
            answer.read(call)
        assert len(answer.tokens[0]) == NUM_TOKENS
        assert running.wait(60) == 0
    assert not any(each.pid is not None and psutil.pid_exists(each.pid) for each in state.processes)


@pytest.mark.long
def test_a_router_drains_when_its_terminal_closes_and_a_later_hangup_does_not_cut_its_drain(
    model: Path, tmp_path: Path
) -> None:
    with process(command(ROUTER, tmp_path / "run", model, pool_grace_s=120.0, **LONG), tmp_path) as running:
        public, internal = (until_said(running, what).rsplit(maxsplit=1)[1] for what in ("serving ", "workers on "))
        with grpc.insecure_channel(public) as channel:
            held = InferenceServiceStub(channel).Generate(greedy([3, 4, 5], 4), wait_for_ready=True)
            until_held(internal, tmp_path / "run" / "secret")
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == SERVING
            running.send_signal(signal.SIGHUP)
            assert next(watch).status != SERVING
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(1.0)
            running.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(1.0)
            running.send_signal(signal.SIGTERM)
            assert ends(running) == 128 + signal.SIGTERM
            assert held.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.long
def test_a_process_under_nohup_goes_on(model: Path, tmp_path: Path) -> None:
    arguments = ["nohup", *command(ROUTER, tmp_path / "run", model)]
    with process(arguments, tmp_path) as running:
        public = until_said(running, "serving ").rsplit(maxsplit=1)[1]
        until_said(running, "workers on ")
        assert is_ignored(running.pid, signal.SIGHUP)
        os.kill(running.pid, signal.SIGHUP)
        with grpc.insecure_channel(public) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert reply.status == SERVING
        running.send_signal(signal.SIGTERM)
        assert ends(running) == 0


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
