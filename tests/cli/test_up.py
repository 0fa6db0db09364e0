"""`pdserve up` as an operator meets it: real processes, a real hand-off, a death, a drain."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pdserve.launch.folder import ClusterState, read_state

pytestmark = pytest.mark.slow

PDSERVE = (sys.executable, "-P", "-m", "pdserve")
NAME = "test-up"
CLUSTER = """
router: {kv_events: "off"}
workers:
  prefill: &small {max_model_len: 256, kv_cache_memory_bytes: 30000000}
"""


@contextmanager
def up(*flags: str) -> Iterator[ClusterState]:
    """Run `pdserve up` with random weights until the block ends; it must then drain and exit 0."""
    command = (*PDSERVE, "up", "--name", NAME, "--load-format", "dummy", *flags)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("ready: "):
                lines.append(process.stderr.readline())
                assert lines[-1], f"ended before it was ready: {lines}"
            yield read_state(NAME)
            pdserve_("down", NAME, name=None)
            assert process.wait(10) == 0
        finally:
            process.kill()


def pdserve_(*arguments: str, name: str | None = NAME) -> str:
    named = () if name is None else ("--name", name)
    ended = subprocess.run((*PDSERVE, *arguments, *named), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def generate() -> list[int]:
    """Return the four tokens that the model answers with."""
    flags = ("--max-tokens", "4", "--ignore-eos", "--temperature", "0", "--json")
    (token_ids,) = json.loads(pdserve_("generate", "one two three", *flags))["token_ids"]
    assert len(token_ids) == 4
    return list(token_ids)


def until_ready_again(incarnation: int) -> None:
    """Follow the state until another incarnation of decode-0 is ready."""
    watch = (*PDSERVE, "status", "--watch", "--json", "--name", NAME)
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            workers = [worker["registration"] for worker in json.loads(line)["workers"]]
            found = [w for w in workers if w["worker_id"] == "decode-0" and w["ready"]]
            if any(int(w["incarnation"]) != incarnation for w in found):
                break
        process.kill()


def until_every_page_is_free() -> None:
    """Follow the state until no worker has a page in use; the test's time limit bounds this."""
    watch = (*PDSERVE, "status", "--watch", "--json", "--name", NAME)
    with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            workers = json.loads(line)["workers"]
            assert len(workers) == 2
            if all(worker["load"]["pages_free"] == worker["registration"]["num_pages"] for worker in workers):
                break
        process.kill()


@pytest.mark.long
def test_a_cluster_serves_outlives_a_death_and_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "cluster.yaml"
    file.write_text(f"{CLUSTER}  decode: {{<<: *small, max_num_seqs: 5}}\n")
    with up("--config", str(file), "--kv-events-endpoint", "tcp://127.0.0.1:*") as state:
        endpoints = {process.name: process.kv_events_endpoint for process in state.processes}
        assert endpoints.pop("router") == ""
        assert all(endpoint.startswith("tcp://127.0.0.1:") for endpoint in endpoints.values())
        assert len(set(endpoints.values())) == 2
        assert f"decode-0 publishes KV events on {endpoints['decode-0']}" in pdserve_("status")
        workers = [each["registration"] for each in json.loads(pdserve_("status", "--json"))["workers"]]
        assert {(each["worker_id"], each["max_num_seqs"]) for each in workers} == {("prefill-0", 64), ("decode-0", 5)}
        before = generate()
        decode = next(process for process in state.processes if process.name == "decode-0")
        assert decode.pid is not None
        os.kill(decode.pid, signal.SIGKILL)
        until_ready_again(decode.incarnation)
        assert generate() == before
        until_every_page_is_free()
    assert not (tmp_path / "pdserve" / NAME / "secret").exists()
    shown = pdserve_("logs", NAME, name=None)
    assert all(f"{name}.log <==" in shown for name in ("router", "prefill-0", "decode-0"))
    assert "drained" in pdserve_("logs", NAME, "decode-0", name=None)
    assert all(process.pid is None or not psutil.pid_exists(process.pid) for process in state.processes)
