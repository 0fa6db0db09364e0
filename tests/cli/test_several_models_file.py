"""Several models in a cluster file: a cluster each, frontends for all, and refusals before anything starts."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from cluster_states import cluster_state

from pdserve.base.clock import MonotonicClock
from pdserve.base.errors import ConfigError
from pdserve.cli import running
from pdserve.cli.cluster_file import read_clusters
from pdserve.launch.folder import state_file
from pdserve.launch.local import Listener, LocalCluster
from pdserve.launch.plan import ClusterSpec, ServedAt, Wiring
from pdserve.launch.several import joined
from pdserve.launch.supervisor import Supervisor
from pdserve.router.config import ModelSettings

Ended = CompletedProcess[str]
Up = tuple[str, list[ClusterSpec]]

BOTH = """
name: both
num_frontends: 2
router:
  port: 7000
  max_num_held: 9
models:
  - model: /models/a
    served_model_name: a/one
    router: {tool_call_parser: mistral, internal_port: 7001, metrics_port: 7004, health_port: 7005}
    workers: {prefill: {replicas: 2}, decode: {metrics_port: 7003}}
  - model: /models/b
    served_model_name: two
    router: {placement: round_robin, internal_port: 7002}
    workers: {decode: {drain_timeout_s: 500}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(BOTH)
    return path


@pytest.fixture
def up(file: Path, pdserve: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Up]:
    """Return what `pdserve up --config FILE` says, and what it would start."""
    monkeypatch.setattr("pdserve.cli.models.fetched", Path)

    def run(*flags: str) -> Up:
        found: list[ClusterSpec] = []

        async def note(given: tuple[ClusterSpec, ...], _terminal: object) -> None:
            found.extend(given)

        monkeypatch.setattr(running, "serve_until_signal", note)
        return pdserve("up", "--config", str(file), *flags).stderr, found

    return run


def children(spec: ClusterSpec) -> dict[str, Any]:
    """Return the flags of each process."""
    wiring = Wiring(spec, public_port=7000, internal_port=spec.internal_port or 0, secret_file=Path("/run/secret"))
    return {child.name: dict(pairwise(child.command)) | {"all": child.command} for child in wiring.children()}


def test_each_model_has_a_cluster_and_the_first_ones_frontends_serve_all(
    up: Callable[..., Up],
) -> None:
    _, (first, second) = up("--max-num-seqs", "3")
    assert (first.name, first.others, second.name) == ("both", ("both-two",), "both-two")
    own = children(first)
    assert set(own) == {"router", "frontend-0", "frontend-1", "prefill-0", "prefill-1", "decode-0"}
    assert "--no-serve-clients" in own["router"]["all"]
    assert (own["router"]["--max-num-held"], own["prefill-1"]["--max-num-seqs"]) == ("9", "3")
    frontend = own["frontend-0"]["all"]
    models = [json.loads(value) for key, value in pairwise(frontend) if key == "--models"]
    a = {
        "model": "/models/a",
        "served_model_name": "a/one",
        "routers": ["127.0.0.1:7001"],
        "tool_call_parser": "mistral",
    }
    assert models == [a, {"model": "/models/b", "served_model_name": "two", "routers": ["127.0.0.1:7002"]}]
    assert not {"--model", "--routers", "--served-model-name", "--tool-call-parser"} & set(frontend)
    ports = {"--metrics-port": "7004", "--health-port": "7005"}
    assert ports.items() <= own["router"].items()
    assert not ports.keys() & set(frontend), "two processes cannot listen on one port"
    drain_s = [float(each["--drain-timeout-s"]) for each in (own["router"], own["frontend-0"])]
    assert drain_s == [first.drain_timeout_s, 500], "a frontend drains for as long as any of its models may"

    behind = children(ClusterSpec(**{**_fields(second), "served_at": ServedAt("127.0.0.1:7000", "")}))
    assert set(behind) == {"router", "prefill-0", "decode-0"}
    assert "--no-serve-clients" in behind["router"]["all"]
    assert behind["router"]["--placement"] == "round_robin"
    assert (first.num_beside, second.num_beside) == (2, 3)


def _fields(spec: ClusterSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("name: both", "model: m", "line 2: model: goes into each of `models`"),
        ("name: both", "workers: {}", "line 2: workers: goes into each of `models`"),
        ("name: both", "max_workers: 9", "line 2: max_workers: goes into each of `models`"),
        ("name: both", "autoscaler: {policy: /p}", "line 2: autoscaler: goes into each of `models`"),
        ("max_num_held: 9", "internal_port: 9", "line 6: router.internal_port: goes into the section router of each"),
        ("num_frontends: 2", "num_frontends: 0", "line 3: num_frontends: 0 is refused: frontends serve several models"),
        ("internal_port: 7002", "port: 7002", "models.1.router.port: unknown key"),
        ("internal_port: 7002", "api_keys_file: k", "models.1.router.api_keys_file: unknown key"),
        ("port: 7002", "port: 7001", "router.internal_port: 7001 is refused: it is the port of models.0.router."),
        ("internal_port: 7002", "metrics_port: 7000", "metrics_port: 7000 is refused: it is the port of router.port"),
        ("port: 7002", "port: 7003", "7003 is refused: it is the port of models.0.workers.decode.metrics_port"),
        ("name: two", "name: a/one", "models.1.served_model_name: 'a/one' is the name of two"),
        ("  - model: /models/b\n", "  - max_workers: 3\n", "models.1.model: is required"),
    ],
)  # fmt: skip
def test_what_several_models_cannot_be_told_is_named_with_its_line(
    file: Path, before: str, after: str, words: str
) -> None:
    assert BOTH.count(before) == 1
    file.write_text(BOTH.replace(before, after))
    with pytest.raises(ConfigError) as refused:
        read_clusters(file)
    assert words in str(refused.value)


def test_an_empty_list_of_models_is_refused(file: Path) -> None:
    file.write_text("models: []\n")
    with pytest.raises(ConfigError, match=r"line 1: models: .*at least 1 item"):
        read_clusters(file)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prefill", "2"), "--prefill: goes with one model"),
        (("--served-model-name", "x"), "--served-model-name: goes with one model"),
        (("--on", "ray"), "--on: ray goes with one model so far"),
        (("--device", "cuda"), "models: device cuda goes with one model so far"),
    ],
)
def test_flags_of_one_model_are_refused_beside_several(
    up: Callable[..., Up], flags: tuple[str, ...], words: str
) -> None:
    said, started = up(*flags)
    assert words in said
    assert not started


def test_two_models_of_one_name_or_one_folder_are_refused() -> None:
    refusals = {
        ("x", "x"): "'x' is the name of two; set served_model_name",
        ("a/b", "c/d", "c-d"): "'c-d' would have the folder of another one, default-c-d; set served_model_name",
    }
    for given, refusal in refusals.items():
        with pytest.raises(ConfigError, match=refusal):
            joined([ClusterSpec("/m", name) for name in given], ModelSettings.model_fields)


def test_down_of_one_of_several_models_ends_nothing_and_names_what_ends_all(
    pdserve: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with subprocess.Popen(["/bin/sleep", "60"]) as launcher:
        try:
            file = state_file("both-two")
            file.parent.mkdir(parents=True)
            file.write_text(cluster_state(supervisor_pid=launcher.pid, lead="both").model_dump_json())
            ended = pdserve("down", "both-two")
            assert launcher.poll() is None
        finally:
            launcher.kill()
    assert (ended.returncode, "`pdserve down both` ends all" in ended.stderr) == (2, True)


@pytest.mark.parametrize("num_ready", [0, 1, 2])
async def test_a_signal_drains_all_models_once_one_of_them_may_be_serving(tmp_path: Path, num_ready: int) -> None:
    supervisors = [Supervisor((), tmp_path, MonotonicClock()) for _ in range(2)]
    listener = Listener(on_status=lambda _: None, on_notice=lambda _: None)
    clusters = [LocalCluster(cluster_state(ready=False), each, listener) for each in supervisors]
    for cluster in clusters[:num_ready]:
        cluster.ready.set()
    stop = running.Stop(clusters, limit_s=1e6, kill_limit_s=1e6)
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.asked.wait()
    kills = num_ready == 0
    assert stop.killed_by == (signal.SIGTERM if kills else None)
    assert [each.is_stopping for each in supervisors] == [kills, kills]
