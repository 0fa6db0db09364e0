"""Prompts that cannot fit are refused at once at every door, and their memory goes back to the system."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from lone_process import ROUTER, command, process
from looking import until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import open_inference_pb2 as open_inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

CHARS, TOKENIZE_CHARS = 4_190_000, 1_040_000  # as long as the bodies of requests may be
MAX_GROWTH_BYTES, MAX_KEPT_BYTES = 200e6, 50e6
AT_ONCE_S, SETTLED_S = (
    4.0,
    10.0,
)  # on a busy machine; tokenizing such a prompt takes longer, and twelve of them a minute


@dataclass
class Doors:
    """A router's endpoints."""

    pid: int
    http: httpx.Client
    channel: grpc.Channel

    def memory(self) -> int:
        return psutil.Process(self.pid).memory_info().rss


@pytest.fixture(scope="module")
def doors(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("flood")
    with process(command(ROUTER, folder / "run", smollm2, http_port=0, pool_grace_s=0.0), folder) as running:
        said = iter(running.stderr.readline, "")  # type: ignore[union-attr]
        found = {}
        for line in said:
            for part in ("serving smollm2", "serving OpenAI", "workers on"):
                if part.lower() in line.lower():
                    found[part] = line.rsplit(maxsplit=1)[1]
            if "workers on" in line:
                break
        threading.Thread(target=running.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        with (
            grpc.insecure_channel(found["serving smollm2"]) as channel,
            httpx.Client(base_url=found["serving OpenAI"], timeout=60) as http,
        ):
            assert http.post("/tokenize", json={"prompt": "warm"}).status_code == 200
            yield Doors(running.pid, http, channel)


def text_of(num_chars: int) -> str:
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    return " ".join(draw.choices(words, k=num_chars // 3))[:num_chars]


TEXT = text_of(CHARS)


def over_http(path: str, body: dict[str, object]) -> Callable[[Doors], tuple[object, str]]:
    def ask(doors: Doors) -> tuple[object, str]:
        reply = doors.http.post(path, json=body)
        error = reply.json()["error"]
        assert error["code"] == "context_length_exceeded"
        return reply.status_code, error["message"]

    return ask


def over_grpc(call: Callable[[grpc.Channel], object]) -> Callable[[Doors], tuple[object, str]]:
    def ask(doors: Doors) -> tuple[object, str]:
        with pytest.raises(grpc.RpcError) as refused:
            call(doors.channel)
        return refused.value.code(), refused.value.details()

    return ask


def triton_request() -> open_inference.ModelInferRequest:
    values = open_inference.InferTensorContents(bytes_contents=[TEXT.encode()])
    tensor = open_inference.ModelInferRequest.InferInputTensor
    given = tensor(name="text_input", datatype="BYTES", shape=[1], contents=values)
    return open_inference.ModelInferRequest(model_name="", inputs=[given])


TURN = {"role": "user", "content": TEXT}
CHAT = inference.Chat(messages=[inference.ChatMessage(role="user", content=TEXT)])
VLLM = vllm.GenerateRequest(request_id="r", text=TEXT, sampling_params=vllm.SamplingParams(max_tokens=4))
ASKED = {
    "completions": over_http("/v1/completions", {"prompt": TEXT}),
    "chat": over_http("/v1/chat/completions", {"messages": [TURN]}),
    "tokenize": over_http("/tokenize", {"prompt": TEXT[:TOKENIZE_CHARS]}),
    "tokenize a chat": over_http("/tokenize", {"messages": [TURN | {"content": TEXT[:TOKENIZE_CHARS]}]}),
    "text": over_grpc(lambda channel: [*InferenceServiceStub(channel).Generate(inference.GenerateRequest(text=TEXT))]),
    "conversation": over_grpc(
        lambda channel: [*InferenceServiceStub(channel).Generate(inference.GenerateRequest(chat=CHAT))]
    ),
    "vLLM": over_grpc(lambda channel: [*VllmEngineStub(channel).Generate(VLLM)]),
    "Triton": over_grpc(lambda channel: GRPCInferenceServiceStub(channel).ModelInfer(triton_request())),
}


@pytest.mark.parametrize("door", ASKED)
def test_a_prompt_that_cannot_fit_is_refused_at_once(doors: Doors, door: str) -> None:
    began_s = time.monotonic()
    status, message = ASKED[door](doors)
    assert status in (400, grpc.StatusCode.INVALID_ARGUMENT), message
    assert "maximum context length is 8192 tokens" in message
    assert time.monotonic() - began_s < AT_ONCE_S


def test_a_flood_of_them_takes_little_memory_and_delays_nobody(doors: Doors) -> None:
    before = doors.memory()
    done = threading.Event()
    most, others_s = [0], []

    def look() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], doors.memory())

    def small() -> None:
        while not done.is_set():
            began_s = time.monotonic()
            assert doors.http.post("/tokenize", json={"prompt": "a word or two"}).status_code == 200
            others_s.append(time.monotonic() - began_s)

    ways = [way for way in ASKED.values() for _ in range(2)][:12]
    with ThreadPoolExecutor(len(ways) + 2) as pool:
        watching = [pool.submit(look), pool.submit(small)]
        try:
            answers = [*pool.map(lambda way: way(doors), ways)]
        finally:
            done.set()
        for each in watching:
            each.result()
    assert {status for status, _ in answers} == {400, grpc.StatusCode.INVALID_ARGUMENT}
    assert most[0] - before < MAX_GROWTH_BYTES
    until(lambda: doors.memory() - before < MAX_KEPT_BYTES, SETTLED_S, doors.memory)
    assert max(others_s) < AT_ONCE_S


@pytest.mark.long
def test_a_long_prompt_that_may_fit_leaves_no_memory_behind(doors: Doors) -> None:
    before = doors.memory()
    for _ in range(3):
        doors.http.post("/v1/completions", json={"prompt": TEXT[:600_000]})
    until(lambda: doors.memory() - before < MAX_KEPT_BYTES, SETTLED_S, doors.memory)
