"""Garbage on every port ends no process, leaves no socket or memory behind, and costs no answer.

PDSERVE_FUZZ_S says for how many seconds, by default few, PDSERVE_FUZZ_SEED where the garbage begins.
"""

import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import lone_process
import psutil
import pytest
import zmq
from live_cluster import LiveCluster, greedy, is_idle, live_cluster
from looking import until
from proofs import proof_for
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from sockets import listening

from pdserve.base.ids import PROTOCOL_VERSION, Incarnation, Peer, WorkerId
from pdserve.kvtransfer import wire
from pdserve.kvtransfer.session import Hello, Introduction
from pdserve.launch.folder import free_port
from pdserve.net.rpc import Metadata, join_address, split_address
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1 import open_inference_pb2 as open_inference
from pdserve.protocol.kvlayout import KvLayout

SECONDS = float(os.environ.get("PDSERVE_FUZZ_S", "15"))
SEED = os.environ.get("PDSERVE_FUZZ_SEED", "0")
FLAGS = ("--dtype", "float32", "--num-pages", "100")
PUBLISHED = ("--kv-events-endpoint", "tcp://127.0.0.1:*", "--kv-events-replay-endpoint", "tcp://127.0.0.1:*")
# As many workers as it begins with: the autoscaler is there for its ports alone.
POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 60000, tpotMs: 60000}
budget: {maxDevices: 2}
pools: {prefill: {maxReplicas: 1, startup: 1s}, decode: {maxReplicas: 1, startup: 1s}}
roleSwitch: {enabled: false, minDwell: 0s}
actuator: {kind: process}
"""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ZMTP = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00"
GROWTH_BYTES = 48 * 2**20  # of one process, after it has seen a third of the garbage
pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 240)]

Beginning = Callable[[random.Random], bytes]


def frames(rng: random.Random) -> bytes:
    """Return HTTP/2: whole frames of any kind, with any flags and content."""
    made = PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for _ in range(rng.randrange(1, 8)):
        payload = rng.randbytes(rng.choice((0, 1, 5, 8, 40, 300)))
        size = len(payload) if rng.random() < 0.9 else rng.randrange(2**24)
        stream = rng.choice((0, 1, 3, 2**31 - 1, rng.randrange(2**32)))
        made += size.to_bytes(3) + bytes([rng.randrange(12), rng.randrange(256)]) + stream.to_bytes(4) + payload
    return made


def spoilt(message: bytes, rng: random.Random) -> bytes:
    """Return a message cut short, with other bytes in it, or with more."""
    made = bytearray(message)
    for _ in range(rng.randrange(4)):
        if made:
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made[: rng.randrange(len(made) + 1)]) + rng.randbytes(rng.choice((0, 0, 3, 50)))


def posted(rng: random.Random) -> bytes:
    """Return a question over HTTP whose length or body is not what it says."""
    body = spoilt(b'{"model": "", "prompt": [3, 4, 5], "max_tokens": 2, "stream": true}', rng)
    size = len(body) if rng.random() < 0.8 else rng.choice((-1, 0, 10**20))
    path = rng.choice((b"completions", b"chat/completions", b"responses", b"embeddings"))
    kind = rng.choice((b"application/json", b"text/plain"))
    return (
        b"POST /v1/%b HTTP/1.1\r\nhost: localhost\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        % (path, kind, size)
        + body
    )


BEGINNINGS: Sequence[Beginning] = (
    lambda rng: rng.randbytes(rng.randrange(1, 2000)),
    frames,
    frames,
    lambda rng: PREFACE[: rng.randrange(len(PREFACE))],
    lambda rng: b"\x16\x03\x01" + rng.randrange(2**14).to_bytes(2) + b"\x01" + rng.randbytes(rng.randrange(500)),
    lambda rng: b"GET /" + b"a" * rng.choice((1, 100, 70_000)) + b" HTTP/1.1\r\n" + rng.choice((b"\r\n", b"")),
    posted,
    lambda rng: ZMTP + rng.choice((b"NULL", b"CURVE", b"PLAIN")).ljust(20, b"\0") + rng.randbytes(rng.randrange(300)),
)


def throw(address: str, rng: random.Random, authority: Path | None) -> None:
    """Say something to a port, and listen for a moment."""
    host, port = split_address(address)
    with suppress(OSError), socket.create_connection((host, int(port)), 5) as plain:
        plain.settimeout(0.02)
        channel = plain
        if authority is not None and rng.random() < 0.5:
            context = ssl.create_default_context(cafile=authority)
            context.check_hostname = False
            context.set_alpn_protocols([rng.choice(("h2", "http/1.1"))])
            plain.settimeout(0.2)
            channel = context.wrap_socket(plain)
            channel.settimeout(0.02)
        with channel:
            channel.sendall(rng.choice(BEGINNINGS)(rng))
            channel.recv(4096)


def call_spoilt(
    channel: grpc.Channel, method: str, message: bytes, rng: random.Random, metadata: Metadata | None = None
) -> None:
    """Make one call whose messages are spoilt, and leave after its first answer."""
    said = iter([spoilt(message, rng) for _ in range(rng.randrange(1, 4))])
    call = channel.stream_stream(f"/{method}")(said, metadata=metadata, timeout=1)
    with suppress(grpc.RpcError):
        next(call)
    call.cancel()


class Caller:
    """Who knows the secret and makes no sense."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster
        state = cluster.state
        pids = [cluster.process.pid, *(process.pid for process in processes(cluster))]
        self.addresses = sorted({join_address(host, int(port)) for pid in pids for host, port in listening(pid)})
        self.published: list[str] = []
        self._handoffs: list[tuple[str, bytes]] = []
        for worker in cluster.status().workers:
            address = worker.registration.handoff_address
            peer = Peer(WorkerId("stranger"), Incarnation(1))
            layout = KvLayout("w", 2, 2, 4, 4, "float32")
            hello = Hello(Introduction(peer, layout), "nixl", Incarnation(7), 0.0)
            self._handoffs.append((address, wire.hello_to_proto(hello).SerializeToString()))
        for process in state.processes:
            ends = (process.kv_events_endpoint, process.kv_events_replay_endpoint)
            self.published += [end.removeprefix("tcp://") for end in ends if end]

    def call(self, rng: random.Random) -> None:
        """Make one call whose message is spoilt."""
        request = greedy([3, 4, 5], 2)
        state = self._cluster.state
        register = link.AttachRequest(
            register=link.Register(worker_id="x", incarnation=5, protocol_version=PROTOCOL_VERSION)
        )
        moves = admin.MoveSequencesRequest(worker_id="decode-0", max_sequences=1)
        of_vllm = vllm.GenerateRequest(request_id="r", text="a", sampling_params=vllm.SamplingParams(max_tokens=2))
        text = open_inference.InferTensorContents(bytes_contents=[b"a"])
        tensor = open_inference.ModelInferRequest.InferInputTensor
        inputs = [tensor(name="text_input", datatype="BYTES", shape=[1], contents=text)]
        of_triton = open_inference.ModelInferRequest(model_name=state.model, inputs=inputs)
        address, method, message = rng.choice(
            (
                (state.endpoint, "pdserve.v1.InferenceService/Generate", request.SerializeToString()),
                (
                    state.endpoint,
                    "pdserve.v1.InferenceService/ListModels",
                    inference.ListModelsRequest().SerializeToString(),
                ),
                (state.endpoint, "vllm.grpc.engine.VllmEngine/Generate", of_vllm.SerializeToString()),
                (state.endpoint, "vllm.grpc.engine.VllmEngine/Abort", of_vllm.SerializeToString()),
                (state.endpoint, "inference.GRPCInferenceService/ModelInfer", of_triton.SerializeToString()),
                (state.endpoint, "inference.GRPCInferenceService/ModelStreamInfer", of_triton.SerializeToString()),
                (state.endpoint, "grpc.health.v1.Health/Watch", b""),
                (state.endpoint, "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"\x3a\x00"),
                (state.admin, "pdserve.v1.LinkService/Attach", register.SerializeToString()),
                (state.admin, "pdserve.v1.AdminService/MoveSequences", moves.SerializeToString()),
                *((address, "pdserve.v1.HandoffService/Attach", hello) for address, hello in self._handoffs),
            )
        )
        with grpc.insecure_channel(address) as channel:
            metadata = None
            if address != state.endpoint:
                metadata = proof_for(channel, state.secret_file, f"/{method}")
            call_spoilt(channel, method, message, rng, metadata)

    def publish(self, rng: random.Random, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Ask publishers of KV events for what is no replay."""
        for address in self.published:
            kind = rng.choice((zmq.DEALER, zmq.SUB, zmq.REQ))
            with context.socket(kind) as asking:
                asking.linger, asking.sndtimeo = 0, 50  # a publisher takes no questions where its events are
                asking.connect(f"tcp://{address}")
                if kind == zmq.SUB:
                    asking.subscribe(rng.randbytes(5))
                else:
                    with suppress(zmq.Again):
                        asking.send_multipart([rng.randbytes(rng.randrange(30)) for _ in range(rng.randrange(1, 4))])
                asking.poll(20)


def processes(cluster: LiveCluster) -> list[psutil.Process]:
    """Return all that the launcher has started, and what those have."""
    return psutil.Process(cluster.process.pid).children(recursive=True)


def usage(cluster: LiveCluster) -> dict[int, tuple[int, int]]:
    """Return bytes of memory and open files of each process, by pid."""
    return {seen.pid: (seen.memory_info().rss, seen.num_fds()) for seen in processes(cluster)}


def assert_rests(cluster: LiveCluster, before: dict[int, tuple[int, int]]) -> None:
    """Fail unless the same processes run, with hardly more memory, and soon as many open files."""

    def left() -> dict[int, tuple[int, int]]:
        now = usage(cluster)
        assert now.keys() == before.keys()
        return {pid: (seen[1], before[pid][1]) for pid, seen in now.items() if seen[1] > before[pid][1] + 4}

    until(lambda: not left(), missing=lambda: f"open files: {left()}")
    grown = {pid: seen[0] - before[pid][0] for pid, seen in usage(cluster).items()}
    assert max(grown.values()) < GROWTH_BYTES, grown


@pytest.fixture(params=["plain", "tls"])
def cluster(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    own = (*PUBLISHED, "--policy", str(policy)) if request.param == "plain" else ("--tls", "--num-frontends", "2")
    with live_cluster(folder, model, *FLAGS, *own) as cluster:
        yield cluster


def test_garbage_on_every_port_changes_nothing(cluster: LiveCluster) -> None:
    rng, asked = random.Random(SEED), greedy([3, *range(5, 60)], 20)
    expected = cluster.generate(asked).tokens
    cluster.wait_for(is_idle, 10)
    caller, authority = Caller(cluster), cluster.state.ca_file
    before, begun_s, num = usage(cluster), time.monotonic(), 0
    with zmq.Context() as context:
        while (passed_s := time.monotonic() - begun_s) < SECONDS:
            if passed_s < SECONDS / 3:
                before = usage(cluster) if num % 50 == 0 else before
            throw(rng.choice(caller.addresses), rng, authority)
            if authority is None:
                caller.call(rng)
                caller.publish(rng, context)
            num += 1
            if num % 100 == 0:
                assert cluster.generate(asked).tokens == expected
    assert num > SECONDS
    assert cluster.generate(asked).tokens == expected
    assert_rests(cluster, before)
    cluster.wait_for(is_idle, 20)


def test_garbage_on_every_port_of_a_worker_that_answers_clients_itself_changes_nothing(
    tmp_path: Path, model: Path
) -> None:
    rng, port = random.Random(SEED), free_port("127.0.0.1")
    params = vllm.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    tokenized = vllm.TokenizedInput(input_ids=range(5, 45))
    asked = vllm.GenerateRequest(request_id="r", tokenized=tokenized, sampling_params=params)
    settings = {"routers": (), "dialect_port": port, "dtype": "float32", "num_pages": 100}
    command = lone_process.command(lone_process.DECODE, tmp_path, model, **settings)
    with (
        lone_process.process(command, tmp_path) as worker,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        assert worker.stderr is not None
        reading = threading.Thread(target=worker.stderr.buffer.read, daemon=True)  # a full pipe would stop the worker
        reading.start()
        lone_process.until_serving(channel)
        engine, process = VllmEngineStub(channel), psutil.Process(worker.pid)

        def tokens() -> list[int]:
            (reply,) = engine.Generate(asked, timeout=60)
            return list(reply.complete.output_ids)

        expected, num_files = tokens(), process.num_fds()
        addresses = sorted(join_address(host, int(each)) for host, each in listening(worker.pid))
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < SECONDS:
            throw(rng.choice(addresses), rng, None)
            method = rng.choice(("Generate", "Abort", "GetModelInfo", "GetLoads"))
            call_spoilt(channel, f"vllm.grpc.engine.VllmEngine/{method}", asked.SerializeToString(), rng)
        assert tokens() == expected
        until(lambda: process.num_fds() <= num_files + 4, missing=process.num_fds)
        assert worker.poll() is None
        worker.kill()
        reading.join()
