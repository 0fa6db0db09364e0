"""`pdserve autoscale simulate`: what it prints and writes, and which flags it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from pdserve.base.errors import ConfigError
from pdserve.cli.autoscale import slow_stretch, stretch

Command = Callable[..., CompletedProcess[str]]

POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 1000, tpotMs: 100}
budget: {maxDevices: 6}
interval: {forecast: 10s}
pools:
  prefill: {maxReplicas: 3, costPerReplicaHour: 2}
  decode: {maxReplicas: 3, costPerReplicaHour: 3}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with a policy, and a trace of a minute."""
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    requests = [{"start_time": i / 4, "prompt_len": 900, "output_len": 40} for i in range(240)]
    (tmp_path / "trace.json").write_text(json.dumps(requests), encoding="utf-8")
    return tmp_path


def test_a_simulated_policy_is_told_in_figures_plots_and_a_log(pdserve: Command, files: Path) -> None:
    paths = str(files / "policy.yaml"), "--workload", str(files / "trace.json"), "--log", str(files / "log.txt")
    flags = "--startup", "5s", "--rate-scale", "4", "--slow", "1.5@20-30", "--decode", "2"
    ended = pdserve("autoscale", "simulate", *paths, *flags, "--json", "-", "--html", str(files / "a.html"))
    assert (ended.returncode, ended.stderr) == (0, "")
    (run,) = json.loads(ended.stdout)["runs"]
    assert (run["name"], run["num_requests"]) == ("policy", 960)
    assert 3 * 60 <= run["device_hours"] * 3600 <= 6 * 60
    assert run["cost"] >= 2 * run["device_hours"]
    assert run["sizes"][0]["ready decode"] == 2
    assert (files / "log.txt").read_text().splitlines() == run["decisions"]
    page = (files / "a.html").read_text(encoding="utf-8")
    for title in ("Requests", "Tokens", "Replicas", "Within both objectives", "Refused"):
        assert f"<h3>{title}</h3>" in page
    assert "decode, paid for" in page


def test_the_trace_that_a_policy_is_warmed_up_with_is_read(pdserve: Command, files: Path) -> None:
    policy = files / "policy.yaml"
    policy.write_text(f"{POLICY}forecaster: {{kind: last, warmupTrace: none.csv}}\n", encoding="utf-8")
    ended = pdserve("autoscale", "simulate", str(policy), "--workload", str(files / "trace.json"))
    assert ended.returncode == 2
    assert "none.csv: No such file" in ended.stderr


@pytest.mark.parametrize("text", ["", "1.5", "x@0-9", "0@0-9", "nan@0-9", "1.5@9-3", "1.5@a-b"])
def test_a_slow_stretch_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slow"):
        slow_stretch(text)


@pytest.mark.parametrize("text", ["", "5", "5-5", "-1-5", "a-b"])
def test_a_stretch_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--window"):
        stretch("--window", text)
