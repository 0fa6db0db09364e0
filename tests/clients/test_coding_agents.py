"""Coding agents that people run in a terminal, as npm has them, against a live cluster: `make test-clients`.

Their prompts have thousands of tokens, and none of them limits an answer. So the model has random weights, room, and
many tokens that end an answer.
"""

import io
import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, is_idle, live_cluster
from model_zoo import write_model

from pdserve.checkpoint.checkpoint import tokenizer_archive
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint

CLIENTS = os.environ.get("PDSERVE_CLIENTS", "")  # the folder with the executables of their environment
AGENTS = Path(CLIENTS).parent / "node_modules" / ".bin"
ENDS_EVERY = 20  # tokens of the vocabulary
QUESTION = "What is the capital of France?"
CODEX = """
model = "{model}"
model_provider = "pdserve"
web_search = "disabled"

[model_providers.pdserve]
name = "pdserve"
base_url = "{url}/v1"
wire_api = "responses"
"""

pytestmark = [
    pytest.mark.skipif(not AGENTS.is_dir(), reason="`make test-clients` installs them, where npm is there"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    model = tmp_path_factory.mktemp("models") / "random"
    write_random(model)
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, "--dtype", "float32") as cluster:
        yield cluster
        cluster.wait_for(is_idle, 30)


def write_random(folder: Path) -> None:
    """Write a small model with the tokenizer and the chat template of SmolLM2."""
    source = open_checkpoint(resolve_model("smollm2-135m-instruct"))
    size = source.config.vocab_size
    write_model("llama3", folder, vocab_size=size, max_position_embeddings=40_000)
    archive = zipfile.ZipFile(io.BytesIO(tokenizer_archive(source)))
    archive.extractall(folder, [name for name in archive.namelist() if name != "config.json"])
    ends = {"eos_token_id": [*range(0, size, ENDS_EVERY)]}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def run(home: Path, agent: str, *arguments: str, **environment: str) -> str:
    """Return what an agent wrote to its standard output; it has a home of its own, and asks nobody else."""
    home.mkdir(exist_ok=True)
    told = {**os.environ, "HOME": str(home), "DISABLE_TELEMETRY": "1", **environment}
    nothing = subprocess.DEVNULL
    done = subprocess.run(
        [AGENTS / agent, *arguments], stdin=nothing, capture_output=True, text=True, check=False, cwd=home, env=told
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_codex_holds_a_conversation_of_two_turns(cluster: LiveCluster, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(model="random", url=cluster.state.http))
    asked = ("exec", "--json", "--skip-git-repo-check")
    turns = [run(home, "codex", *asked, *more) for more in ((QUESTION,), ("resume", "--last", "Why?"))]
    for turn in turns:
        events: list[dict[str, Any]] = [json.loads(line) for line in turn.splitlines()]
        assert events[-1]["type"] == "turn.completed", turn
        assert events[-1]["usage"]["input_tokens"] > 1000
        assert any(event.get("item", {}).get("type") == "agent_message" for event in events)


def test_claude_code_holds_a_conversation_of_two_turns(cluster: LiveCluster, tmp_path: Path) -> None:
    flags = ("--model", "random", "--output-format", "json", "-p")
    at = {"ANTHROPIC_BASE_URL": cluster.state.http, "ANTHROPIC_API_KEY": "none"}
    at["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    for arguments in ((QUESTION,), ("Why?", "--continue"), (QUESTION, "--tools", "", "--system-prompt", "Be brief.")):
        told = json.loads(run(tmp_path / "home", "claude", *flags, *arguments, **at))
        assert not told["is_error"], told
        assert told["result"]
        assert told["usage"]["output_tokens"] > 0
