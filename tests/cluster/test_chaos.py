"""Workers are killed while requests run: every client gets every token, and every page comes back."""

import asyncio
from pathlib import Path

import pytest
from model_zoo import write_model

from pdserve.launch.plan import ClusterSpec
from pdserve.measure.chaos import ChaosTrial, FaultPlan, run_chaos
from pdserve.measure.known_answers import Lengths, known_requests

SEED = 7
FLAGS = {"dtype": "float32", "num_threads": 1}

pytestmark = pytest.mark.long


def test_killed_workers_and_failed_copies_cost_no_client_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = write_model("llama3", tmp_path / "model")
    requests = known_requests(str(model), "float32", 40, Lengths(prompt=256, answer=32), SEED)
    flags = {**FLAGS, "test_fail_copies": 1 / 16}
    spec = ClusterSpec(str(model), "chaos", num_prefill=2, num_decode=2, name="chaos", worker_flags=flags)
    trial = ChaosTrial("chaos", spec, 300, 8, FaultPlan(every_s=3.0, seed=SEED))
    verdict = asyncio.run(run_chaos(trial, requests, lambda _: None))
    assert verdict.tally.num_right == trial.num_requests, verdict
    assert verdict.left_over == ""
    assert verdict.ended == {"OK": trial.num_requests}
    assert verdict.faults
    assert verdict.num_replaced > 0


def test_a_router_that_is_killed_again_and_again_costs_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = write_model("llama3", tmp_path / "model")
    requests = known_requests(str(model), "float32", 20, Lengths(prompt=128, answer=64), SEED)
    spec = ClusterSpec(
        str(model), "routers", name="routers", num_frontends=2, worker_flags={**FLAGS, "test_step_s": 0.02}
    )
    plan = FaultPlan(every_s=2.0, seed=SEED, victims="router")
    verdict = asyncio.run(run_chaos(ChaosTrial("routers", spec, 120, 8, plan), requests, lambda _: None))
    assert not verdict.tally.problems
    assert verdict.is_clean, verdict
    assert verdict.faults
