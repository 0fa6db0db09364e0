"""Real clusters: `pdserve up` in a process of its own, spoken to over its public endpoint and its admin port."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import cluster_logs
import grpc
from proofs import operators_proof

from pdserve.launch.folder import ClusterState
from pdserve.net.certificates import IDENTITY_FILES, Part
from pdserve.net.rpc import Metadata
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

START_TIMEOUT_S = 90
TAKE_TURNS = ("--placement", "least_loaded")
ANY_PORT = ("--router-port", "0", "--http-port", "0")  # what else runs on this machine may want the usual ones
STOP_TIMEOUT_S = 30


@dataclass
class Answer:
    """What a client has once a request has ended."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[inference.TokenLogprobs]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    usage: inference.Usage = field(default_factory=inference.Usage)
    ledger: inference.Ledger = field(default_factory=inference.Ledger)

    def add(self, reply: inference.GenerateResponse) -> None:
        for delta in reply.deltas:
            self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.index, []).extend(delta.logprobs)
            self.text[delta.index] = self.text.get(delta.index, "") + delta.text
            if delta.finish_reason:
                assert delta.index not in self.finish, "a continuation ended twice"
                self.finish[delta.index] = delta.finish_reason
        if reply.HasField("ledger"):
            self.usage, self.ledger = reply.usage, reply.ledger

    def read(self, call: grpc.Call) -> "Answer":
        """Take in a stream to its end; its failure is raised, and what came before it stays."""
        for reply in call:
            self.add(reply)
        return self


class LiveCluster:
    """A running cluster, as its clients, its operator and its enemies see it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, name: str = "*") -> None:
        """`name`: of the cluster, where the process runs several."""
        self.process = process
        self._folder, self._name = folder, name
        state = self.state
        self.endpoint = state.endpoint
        self.channel = self.dial(state.endpoint)
        self.inference = InferenceServiceStub(self.channel)
        self._admin_channel = self.dial(state.admin, Part.OPERATOR)
        self.admin = AdminServiceStub(self._admin_channel)

    @property
    def state(self) -> ClusterState:
        (path,) = self._folder.glob(f"pdserve/{self._name}/state.json")
        return ClusterState.model_validate_json(path.read_text())

    @property
    def certificates(self) -> Path:
        """The folder of its certificates, where it has some."""
        identity_dir = self.state.identity_dir
        assert identity_dir is not None
        return identity_dir.parent

    def dial(self, address: str, part: Part | None = None, listener: Part = Part.ROUTER) -> grpc.Channel:
        """Dial as a client, or another process as one with a part."""
        if self.state.identity_dir is None:
            return grpc.insecure_channel(address)
        authority = ((certificates := self.certificates) / "ca.crt").read_bytes()
        if part is None:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
        certificate, key, _ = ((certificates / part / name).read_bytes() for name in IDENTITY_FILES)
        shown = grpc.ssl_channel_credentials(authority, key, certificate)
        return grpc.secure_channel(address, shown, [("grpc.ssl_target_name_override", listener.host)])

    def start(self, request: inference.GenerateRequest, timeout_s: float = 120) -> grpc.Call:
        return self.inference.Generate(request, timeout=timeout_s)

    def generate(self, request: inference.GenerateRequest, timeout_s: float = 120) -> Answer:
        return Answer().read(self.start(request, timeout_s))

    def generate_all(self, requests: list[inference.GenerateRequest]) -> list[Answer]:
        """Send all at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.generate, requests))

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process of the cluster, by its name."""
        os.kill(self.pid_of(name), number)

    @contextmanager
    def frozen(self, *names: str) -> Iterator[None]:
        """Keep processes from running for the length of the block. Those that have ended meanwhile stay so."""
        pids = [self.pid_of(name) for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def pid_of(self, name: str) -> int:
        pid = self.state.pid_of(name)
        assert pid is not None
        return pid

    def status(self, timeout_s: float = 10) -> admin.ClusterStatus:
        proof = self.proof("GetStatus", timeout_s)
        return self.admin.GetStatus(admin.GetStatusRequest(), metadata=proof, timeout=timeout_s).status

    def wait_for(self, wanted: Callable[[admin.ClusterStatus], bool], timeout_s: float) -> admin.ClusterStatus:
        """Return the first status that is as wanted, or fail after a time. A router that starts again is awaited."""
        last = admin.ClusterStatus()
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                for last in self._watch(left_s):
                    if wanted(last):
                        return last
            except grpc.RpcError as error:
                if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                    raise
        raise AssertionError(f"not within {timeout_s} s: {last}")

    def _watch(self, timeout_s: float) -> Iterator[admin.ClusterStatus]:
        request = admin.WatchStatusRequest()
        updates = self.admin.WatchStatus(request, metadata=self.proof("WatchStatus", timeout_s), timeout=timeout_s)
        for update in updates:
            yield update.status

    def proof(self, method: str, timeout_s: float) -> Metadata:
        """Return the metadata of one call of the operator's."""
        return operators_proof(self._admin_channel, self.state.secret_file, method, timeout_s)

    def close(self) -> None:
        self.channel.close()
        self._admin_channel.close()


def is_idle(status: admin.ClusterStatus) -> bool:
    """Return whether nothing is going on and every page of every ready worker is free (or free and cached)."""
    workers = [worker for worker in status.workers if worker.registration.ready]
    return status.num_active == status.num_held == 0 and all(
        worker.load.pages_free == worker.registration.num_pages and worker.load.num_handoffs == 0 for worker in workers
    )


def load_of(status: admin.ClusterStatus, name: str) -> link.Heartbeat:
    """Return what a worker last said of its load; nothing at all of one that is not attached."""
    return next((w.load for w in status.workers if w.registration.worker_id == name), link.Heartbeat())


def all_ready(count: int) -> Callable[[admin.ClusterStatus], bool]:
    return lambda status: sum(worker.registration.ready for worker in status.workers) == count


@contextmanager
def live_cluster(
    folder: Path, model: Path | None, *flags: str, has_seats: bool = False, name: str = "*"
) -> Iterator[LiveCluster]:
    """Run `pdserve up` for the length of the block; it must drain and leave nothing behind.

    Unless the flags say otherwise, workers of a pool that are equally idle take turns: tests count on who meets whom.
    Without a model the flags lead to a file that has several; the cluster's `name` is then one of theirs.
    Each worker computes with one thread, unless it `has_seats`: clusters of several tests share few cores.
    """
    given = () if model is None else (str(model),)
    threads = () if has_seats else ("--num-threads", "1")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    command = [sys.executable, "-P", "-m", "pdserve", "up", *given, *ANY_PORT, *TAKE_TURNS, *threads, *flags]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    cluster_logs.register(folder)
    try:
        _await_ready(process, folder)
        cluster = LiveCluster(process, folder, name)
        try:
            yield cluster
        finally:
            cluster.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0
    except BaseException as error:
        for process_name, text in cluster_logs.of_cluster(folder):
            error.add_note(f"--- log of {process_name}\n{text}")
        raise
    finally:
        cluster_logs.unregister(folder)
        if process.poll() is None:
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Return when `pdserve up` has its workers; its own end, or a time, is a failure."""
    deadline_s, log = time.monotonic() + START_TIMEOUT_S, folder / "up.log"
    while not any('"ready": true' in path.read_text() for path in folder.glob("pdserve/*/state.json")):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            raise AssertionError(log.read_text())
        assert time.monotonic() < deadline_s, log.read_text()


def greedy(prompt: Sequence[int], max_tokens: int, **sampling: float) -> inference.GenerateRequest:
    """Return a request for the likeliest tokens, as many as asked."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    return inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=prompt), sampling=inference.SamplingParams(**params)
    )
