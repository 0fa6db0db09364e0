"""The laboratory's commands: flags that cannot be are refused, and what is compared stands side by side."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.__main__ import app
from lab.simulator import shape_of
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import link_pb2 as link

HERE = Path(__file__).parent
POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 1000, tpotMs: 100}
budget: {maxDevices: 6}
interval: {forecast: 10s}
pools: {prefill: {maxReplicas: 3}, decode: {maxReplicas: 3}}
"""


@pytest.mark.long
def test_a_policy_stands_beside_its_rivals(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    trace = [{"start_time": i / 4, "prompt_len": 900, "output_len": 40} for i in range(240)]
    (tmp_path / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    policy, trace_file, page = (str(tmp_path / name) for name in ("policy.yaml", "trace.json", "a.html"))
    flags = "--startup", "5s", "--rate-scale", "4", "--decode", "2", "--rival", "hpa", "--rival", "planner"
    ended = CliRunner().invoke(app, ["versus", policy, "--workload", trace_file, "--html", page, *flags, "--json", "-"])
    assert (ended.exit_code, ended.stderr.splitlines()) == (0, ["policy", "hpa", "planner"])
    runs = json.loads(ended.stdout)["runs"]
    assert [run["name"] for run in runs] == ["policy", "HPA, queue and KV usage", "planner rules"]
    assert {run["num_requests"] for run in runs} == {960}
    assert "both, planner rules" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "flags", [("moves", "--pause", "0"), ("simulator", "--load", "nan"), ("versus", "--rival", "x")]
)
def test_a_flag_that_cannot_be_is_refused_before_anything_starts(flags: tuple[str, ...]) -> None:
    command, flag, value = flags
    ended = CliRunner().invoke(app, [command, "/no/such/file", flag, value])
    assert ended.exit_code == 2
    assert f"Invalid value for '{flag}'" in ended.stderr


@pytest.mark.long
def test_an_operators_mistake_is_one_line() -> None:
    command = [sys.executable, "-m", "lab", "versus", "/no/such/policy.yaml", "--workload", "2x3x4"]
    ended = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    assert "/no/such/policy.yaml" in ended.stderr


def test_the_simulator_is_given_the_live_clusters_shape() -> None:
    roles = (link.ROLE_PREFILL, 2048), (link.ROLE_DECODE, 512)
    told = [link.Register(role=role, ready=True, max_num_batched_tokens=chunk) for role, chunk in roles]
    shape = shape_of(admin.ClusterStatus(workers=[admin.WorkerStatus(registration=each) for each in told]))
    assert (shape.prefill, shape.decode, shape.prefill_chunk, shape.decode_chunk) == (1, 1, 2048, 512)


def test_planning_is_measured_with_one_group_of_layers_and_with_two() -> None:
    ended = CliRunner().invoke(app, ["scheduler", "--sequences", "3", "--steps", "70", "--json", "-"])
    assert ended.exit_code == 0, ended.output
    runs = json.loads(ended.stdout)["runs"]
    assert [(run["num_sequences"], run["num_groups"]) for run in runs] == [(3, 1), (3, 2)]
    assert all(0 < run["least_s"] <= run["median_s"] for run in runs)


@pytest.mark.long
def test_a_mixture_stands_beside_a_dense_model_and_a_loop() -> None:
    ended = CliRunner().invoke(app, ["experts", "--layers", "1", "--rounds", "1", "--vectors", "--json", "-"])
    assert ended.exit_code == 0
    runs = json.loads(ended.stdout)["runs"]
    assert [run["step"] for run in runs] == ["1 x 1", "16 x 1", "1 x 512"]
    assert (runs[0]["experts"], round(runs[0]["bytes_to_dense"], 1)) == (8.0, 1.0)
    assert all(run[f"{model}_ms"] > 0 for run in runs for model in ("mixture", "dense", "loop"))
