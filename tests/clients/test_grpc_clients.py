"""Clients of others against live clusters: Triton's own, and the gateway smg in front of two routers and two workers.

They need another protobuf than pdserve: PDSERVE_CLIENTS names the folder with the programs of their environment.
"""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import lone_process
import pytest
from live_cluster import LiveCluster, is_idle, live_cluster
from looking import until
from scraping import scrape

from pdserve.checkpoint.fetch import resolve_model
from pdserve.launch.folder import free_port
from pdserve.observe import metrics

pytestmark = [
    pytest.mark.skipif("PDSERVE_CLIENTS" not in os.environ, reason="make test-clients sets it"),
]

MODEL = "smollm2-135m-instruct"
PORT, METRICS_PORT = 8491, 8492  # smg takes no port of its own choice
START_TIMEOUT_S = 150
HELLO = [{"role": "user", "content": "Name the capital of France."}]


def program(name: str) -> str:
    return str(Path(os.environ["PDSERVE_CLIENTS"]) / name)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LiveCluster]]:
    """Two routers, each with workers of its own."""
    flags = ("--dtype", "float32", "--served-model-name", MODEL)
    with ExitStack() as stack:
        model, folders = resolve_model(MODEL), [tmp_path_factory.mktemp(name) for name in "ab"]
        yield [stack.enter_context(live_cluster(folder, model, *flags)) for folder in folders]


def test_tritons_own_client_infers_and_streams(clusters: list[LiveCluster]) -> None:
    script = Path(__file__).with_name("ask_triton.py")
    command = [program("python"), str(script), clusters[0].endpoint, MODEL]
    subprocess.run(command, check=True, timeout=120)


@contextmanager
def gateway(engines: list[str]) -> Iterator[str]:
    """Run smg in front of engines, host:port each; yield its URL."""
    urls = [f"grpc://{engine}" for engine in engines]
    ports = ("--host", "127.0.0.1", "--port", str(PORT), "--prometheus-port", str(METRICS_PORT))
    command = [program("smg"), "launch", "--worker-urls", *urls, "--policy", "round_robin", *ports]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{PORT}"
        finally:
            process.terminate()


def ask(url: str, **fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 8} | fields).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        content: bytes = reply.read()
    return content


def first_answer(url: str) -> bytes:
    """Ask until the gateway has both routers and the tokenizer."""

    def answer() -> bytes | None:
        with suppress(OSError):  # it does not listen, or has no engine yet
            return ask(url)
        return None

    return until(answer, START_TIMEOUT_S)


def check_answers(url: str) -> None:
    """Ask a gateway until it answers, then for the same some times, whole and streamed."""
    first_answer(url)
    texts = {json.loads(ask(url))["choices"][0]["message"]["content"] for _ in range(4)}
    lines = [line for line in ask(url, stream=True).decode().splitlines() if line.startswith("data: {")]
    assert len(texts) == 1
    assert "Paris" in texts.pop()
    deltas = [json.loads(line.removeprefix("data: "))["choices"] for line in lines]
    assert "Paris" in "".join(choice["delta"].get("content") or "" for choices in deltas for choice in choices)


def test_a_gateway_in_front_of_two_routers_answers_from_both(clusters: list[LiveCluster]) -> None:
    before = [cluster.status().demand.num_requests for cluster in clusters]
    with gateway([cluster.endpoint for cluster in clusters]) as url:
        check_answers(url)
    for cluster in clusters:
        status = cluster.wait_for(is_idle, 20)
        assert status.demand.num_requests > before.pop(0)


def test_a_gateway_in_front_of_two_workers_answers_from_both(tmp_path: Path) -> None:
    ports, shown = [[free_port("127.0.0.1") for _ in range(2)] for _ in range(2)]
    own = {"role": "mixed", "routers": (), "dtype": "float32", "served_model_name": MODEL}
    with ExitStack() as stack:
        for name, port, metrics_port in zip("ab", ports, shown, strict=True):
            settings = {**own, "worker_id": name, "dialect_port": port, "metrics_port": metrics_port}
            command = lone_process.command(lone_process.DECODE, tmp_path / name, resolve_model(MODEL), **settings)
            stack.enter_context(lone_process.process(command, tmp_path / name))
        with gateway([f"127.0.0.1:{port}" for port in ports]) as url:
            check_answers(url)
        for port in shown:
            assert scrape(f"127.0.0.1:{port}").total(metrics.SAMPLED_TOKENS.name) > 0
