"""One process of a cluster, started alone, and a router that places on a worker what never ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from proofs import KnowSecret

from pdserve.base.ids import new_request_id
from pdserve.launch.folder import write_secret
from pdserve.launch.plan import flag_arguments
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.link_pb2_grpc import LinkServiceServicer, add_LinkServiceServicer_to_server
from pdserve.protocol.token_ids import to_wire

DIRECT_START_S = 60
ROUTER, PREFILL, DECODE, UP = "router", "prefill", "decode", "up"
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
UNPRIVILEGED = ("unshare", "--user", "--map-root-user", *NAMESPACE[1:])


def command(kind: str, folder: Path, model: Path, **flags: object) -> list[str]:
    """Return the command line of a process whose secret is in the folder."""
    folder.mkdir(exist_ok=True)
    pdserve = [sys.executable, "-P", "-m", "pdserve", "worker" if kind in (PREFILL, DECODE) else kind]
    if kind == UP:
        return [*pdserve, str(model), *flag_arguments({"router_port": 0, "http_port": 0, **flags})]
    own: dict[str, object] = {"model": model, "secret_file": write_secret(folder), **flags}
    if kind == ROUTER:
        own = {"port": 0, "internal_port": 0, **own}
    else:
        own = {"role": kind, "worker_id": "w0", "routers": ("127.0.0.1:1",), "num_threads": 1, **own}
    return [*pdserve, *flag_arguments(own)]


@contextmanager
def process(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process for the length of the block; it is killed then if it has not ended. Its folder holds its state.

    It heeds SIGHUP even where these tests run under nohup: what is handled here, and not ignored, is not ignored there.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def as_process_1(arguments: list[str]) -> list[str]:
    """Return the command that runs another as the first process of a PID namespace; skip where none can be made."""
    for enter in (NAMESPACE, UNPRIVILEGED):
        try:
            made = subprocess.run([*enter, "true"], check=False, capture_output=True).returncode == 0
        except FileNotFoundError:
            made = False
        if made:
            return [*enter, *arguments]
    pytest.skip("needs PID namespaces")


def child_of(parent: subprocess.Popen[str]) -> int:
    """Return the process id, seen from here, of the one child of a process."""
    (child,) = psutil.Process(parent.pid).children()
    return child.pid


def until_serving(channel: grpc.Channel) -> None:
    """Return once a worker that answers clients itself takes requests."""
    asked = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
    news = health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=DIRECT_START_S, wait_for_ready=True)
    assert any(reply.status == health_pb2.HealthCheckResponse.SERVING for reply in news)


class EndlessRouter(LinkServiceServicer):
    """Places one request on a decode worker; the prefill worker that it names never comes."""

    def __init__(self) -> None:
        self.holds_request = threading.Event()  # the worker has said so
        self.drains = threading.Event()
        self.registered = link.Register()  # as last received

    def Attach(  # noqa: N802
        self, requests: Iterator[link.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[link.AttachResponse]:
        del context
        yield link.AttachResponse(welcome=link.Welcome(router_id="endless", incarnation=1))
        placed = False
        for request in (each for first in requests for each in (first, *first.more)):
            if request.HasField("register"):
                self.registered = request.register
            if request.HasField("register") and request.register.ready and not placed:
                placed = True
                yield link.AttachResponse(place=endless_decode())
            if request.heartbeat.num_handoffs:
                self.holds_request.set()
            if request.heartbeat.draining:
                self.drains.set()


def endless_decode() -> link.Place:
    spec = link.SequenceSpec(
        request_id=new_request_id(),
        token_ids=to_wire([3, 4, 5]),
        num_prompt_tokens=3,
        sampling=inference.SamplingParams(max_tokens=8, temperature=0.0),
        indices=[0],
        deadline_ms=600_000,
    )
    return link.Place(spec=spec, source=link.WorkerRef(worker_id="nobody", incarnation=1))


@contextmanager
def endless_router(secret_file: Path) -> Iterator[tuple[EndlessRouter, str]]:
    """Serve such a router for the length of the block; yields it and its address."""
    with ThreadPoolExecutor(8) as pool:
        router = EndlessRouter()
        server = grpc.server(pool, interceptors=[KnowSecret(secret_file)])
        add_LinkServiceServicer_to_server(router, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield router, f"127.0.0.1:{port}"
        server.stop(None).wait()
