"""Clients that people have already, against a live cluster: `make test-clients` installs them beside the project.

None of them may ask a hub: tokenizers are those of the model's file.
"""

import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from live_cluster import LiveCluster, is_idle, live_cluster
from model_zoo import load_oracle

from pdserve.checkpoint.checkpoint import tokenizer_archive
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint

CLIENTS = os.environ.get("PDSERVE_CLIENTS")  # the folder with the executables of their environment
FUZZING_S = os.environ.get("PDSERVE_FUZZING_S", "300")
BENCHMARK_S = 60
MODEL = "smollm2-135m-instruct"
REPOSITORY, COMMIT = f"models--{MODEL}", "0" * 40  # as a hub's cache has it
HERE = Path(__file__).parent
TASKS = HERE / "tasks"
CAPITALS = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text().splitlines()]

pytestmark = [
    pytest.mark.skipif(CLIENTS is None, reason="`make test-clients` installs the clients"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    flags = ("--dtype", "float32", "--served-model-name", MODEL, "--max-model-len", "256")  # no answer is long
    with live_cluster(tmp_path_factory.mktemp("cluster"), Path(MODEL), *flags) as cluster:
        yield cluster
        cluster.wait_for(is_idle, 30)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what was fetched from a hub, with the model's tokenizer in it."""
    hub = tmp_path_factory.mktemp("hub")
    (hub / REPOSITORY / "refs").mkdir(parents=True)
    (hub / REPOSITORY / "refs" / "main").write_text(COMMIT)
    archive = tokenizer_archive(open_checkpoint(resolve_model(MODEL)))
    zipfile.ZipFile(io.BytesIO(archive)).extractall(hub / REPOSITORY / "snapshots" / COMMIT)
    return hub


Run = Callable[..., None]


@pytest.fixture
def run(hub: Path, tmp_path: Path) -> Run:
    """Run a program of the clients' environment, in a folder with the tasks."""
    tasks = shutil.copytree(TASKS, tmp_path / "tasks")
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    environment = {**os.environ, **offline, "HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(hub)}

    def run(*command: object) -> None:
        name, *arguments = map(str, command)
        done = subprocess.run(
            [f"{CLIENTS}/{name}", *arguments], capture_output=True, text=True, check=False, cwd=tasks, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("script", ["langchain_client.py", "llama_index_client.py"])
def test_integrations_of_frameworks(cluster: LiveCluster, run: Run, script: str) -> None:
    run("python", HERE / script, cluster.state.http, MODEL)


@pytest.mark.parametrize(
    "client",
    ["openai", "langchain-openai", "litellm", "openai-agents", "openai-agents over responses", "instructor"],
)
def test_conversations_with_tools_go_on_through(cluster: LiveCluster, run: Run, client: str) -> None:
    run("python", HERE / "converse.py", client, cluster.state.http, MODEL)


def test_schemathesis_finds_no_server_error(cluster: LiveCluster, run: Run) -> None:
    checks = ("--checks", "not_a_server_error", "--exclude-path", "/ready")
    checks += ("--max-time", FUZZING_S, "--request-timeout", "120")
    run("schemathesis", "run", f"{cluster.state.http}/openapi.json", *checks)


def samples_of(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return what lm-eval has written of a task's questions, in their order."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("tokenizer_is", ["the model's", "asked for at the server"])
def test_lm_eval_scores_texts_as_transformers_does(
    cluster: LiveCluster, run: Run, hub: Path, tmp_path: Path, tokenizer_is: str
) -> None:
    model = {"model": MODEL, "base_url": f"{cluster.state.http}/v1/completions"}
    folder = hub / REPOSITORY / "snapshots" / COMMIT
    model |= {"tokenizer": folder} if tokenizer_is == "the model's" else {"tokenizer_backend": "remote"}
    evaluate(run, "local-completions", model, "scored", tmp_path, "--batch_size", "2")
    oracle, tokens = load_oracle(resolve_model(MODEL)), open_checkpoint(resolve_model(MODEL)).tokenizer()
    for asked, sample in zip(CAPITALS, samples_of(tmp_path, "scored"), strict=True):
        whole = tokens.encode(asked["begun"] + asked["answer"], add_special=False)
        places = range(len(tokens.encode(asked["begun"], add_special=False)) - 1, len(whole) - 1)
        with torch.no_grad():
            scores = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
        expected = sum(float(scores[place, whole[place + 1]]) for place in places)
        is_greedy = all(int(scores[place].argmax()) == whole[place + 1] for place in places)
        ((found, was_greedy),) = sample["filtered_resps"]
        assert float(found) == pytest.approx(expected, abs=1e-3)
        assert str(was_greedy) == str(is_greedy)


def test_lm_eval_asks_in_chats(cluster: LiveCluster, run: Run, tmp_path: Path) -> None:
    model = {"model": MODEL, "base_url": f"{cluster.state.http}/v1/chat/completions"}
    evaluate(run, "local-chat-completions", model, "asked", tmp_path, "--apply_chat_template")
    with openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none") as client:
        for asked, sample in zip(CAPITALS, samples_of(tmp_path, "asked"), strict=True):
            messages: Any = [{"role": "user", "content": asked["question"]}]
            limits: Any = {"max_tokens": 16, "temperature": 0, "stop": ["\n"]}
            answer = client.chat.completions.create(model=MODEL, messages=messages, **limits)
            assert sample["resps"] == [[answer.choices[0].message.content]]


def evaluate(run: Run, kind: str, model: dict[str, object], task: str, folder: Path, *flags: str) -> None:
    arguments = ",".join(f"{name}={value}" for name, value in model.items())
    where = ("--tasks", task, "--include_path", ".", "--output_path", folder, "--log_samples")
    run("lm_eval", "--model", kind, "--model_args", arguments, *where, *flags)


def test_aiperf_reports_goodput(cluster: LiveCluster, run: Run, tmp_path: Path) -> None:
    load = ("--isl", 100, "--osl", 24, "--concurrency", 2, "--benchmark-duration", BENCHMARK_S)
    goodput = ("--goodput", "time_to_first_token:20000 inter_token_latency:2000")
    shown = ("--artifact-dir", tmp_path, "--ui", "none", "--no-gpu-telemetry")
    server = ("--model", MODEL, "--url", cluster.state.http, "--endpoint-type", "chat", "--streaming")
    run("aiperf", "profile", *server, "--tokenizer", MODEL, *load, *goodput, *shown)
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    report = json.loads(path.read_text())
    num_requests, num_good = (report[name]["avg"] for name in ("request_count", "good_request_count"))
    assert 0 < num_good <= num_requests
    assert 0 < report["goodput"]["avg"] <= report["request_throughput"]["avg"]
    assert not report.get("error_summary")
