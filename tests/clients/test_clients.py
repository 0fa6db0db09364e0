"""Clients that people have already, against a live cluster: `make test-clients` installs them beside the project."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_cluster import LiveCluster, is_idle, live_cluster
from model_zoo import load_oracle, write_model

CLIENTS = os.environ.get("PDSERVE_CLIENTS")  # the folder with the executables of their environment
SMOLLM2, FUZZING_S = "smollm2-135m-instruct", 300
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(CLIENTS is None, reason="`make test-clients` installs the clients"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with live_cluster(tmp_path_factory.mktemp("cluster"), Path(SMOLLM2), "--dtype", "float32") as cluster:
        yield cluster
        cluster.wait_for(is_idle, 30)


def run(*command: object) -> str:
    """Run a program of the clients' environment; return what it writes."""
    name, *arguments = map(str, command)
    done = subprocess.run([f"{CLIENTS}/{name}", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_langchain(cluster: LiveCluster) -> None:
    run("python", HERE / "langchain_client.py", cluster.state.http, SMOLLM2)


def test_schemathesis_finds_no_server_error(cluster: LiveCluster) -> None:
    url = cluster.state.http
    checks = ("--checks", "not_a_server_error", "--exclude-path", "/ready", "--max-time", FUZZING_S)
    run("schemathesis", "run", f"{url}/openapi.json", *checks)


def test_lm_evals_loglikelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    model = write_model("llama3", tmp_path / "llama3")
    oracle = load_oracle(model)
    pairs = [([5, 6, 7, 8], [9, 10]), ([30, 31], [32, 33, 34]), ([3] * 20, [4])]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    with live_cluster(tmp_path, model, "--dtype", "float32") as cluster:
        shown = run("python", HERE / "lm_eval_client.py", cluster.state.http, "llama3", tmp_path / "pairs.json")
    for (context, continuation), (logprob, _) in zip(pairs, json.loads(shown), strict=True):
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            scores = oracle(ids).logits[0].log_softmax(-1)
        places = range(len(context) - 1, ids.shape[1] - 1)
        expected = sum(float(scores[place, ids[0, place + 1]]) for place in places)
        assert logprob == pytest.approx(expected, abs=1e-3)
