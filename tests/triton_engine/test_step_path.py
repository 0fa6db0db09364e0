"""Every kind of step, on a GPU that is not there: nothing is mixed with the host's tensors, and nothing waits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
LAYER = ["rms_norm", "rope_write", "attend", "rms_norm", "silu_mul"]


@pytest.fixture(scope="module")
def steps() -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SUPPORT)
    command = [sys.executable, str(SUPPORT / "recorded_steps.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {step.pop("step"): step for step in map(json.loads, done.stdout.splitlines())}


def test_no_step_gives_the_device_what_lies_on_the_host_or_waits_for_it(steps: dict[str, dict[str, Any]]) -> None:
    assert len(steps) > 15
    names = {"greedy, latents", "greedy, states", "copies, states", "all kinds, head", "all kinds, module"}
    assert names <= steps.keys()
    assert {name: step["mixed"] for name, step in steps.items() if step["mixed"]} == {}
    assert {name for name, step in steps.items() if step["waits"]} == {"guesses of a head", "guesses of a module"}


def test_a_layer_takes_five_kernels_beside_its_products(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["greedy"]["kernels"][: 2 * len(LAYER) + 3] == [*LAYER, *LAYER, "rms_norm", "scan", "choose"]


def test_states_are_written_once_for_all_layers_behind_the_samples(steps: dict[str, dict[str, Any]]) -> None:
    kernels = [name for name in steps["greedy, states"]["kernels"] if name != "combine"]
    last = [*LAYER, "rms_norm", "scan", "choose", "keep"]
    prompts = ["rms_norm", "convolve", "recur", "within_blocks", "across_blocks", "gate", "rms_norm", "silu_mul"]
    tokens = ["rms_norm", "convolve", "recur", "gate", "rms_norm", "silu_mul"]
    assert kernels == [*prompts, *last, "keep_blocks", *tokens, *last]


def test_a_head_takes_in_a_step_with_a_layers_attention_behind_the_sampled_tokens(
    steps: dict[str, dict[str, Any]],
) -> None:
    wanted = [*LAYER * 2, "rms_norm", "scan", "choose", "rms_norm", "rms_norm", "rope_write", "attend"]
    assert steps["greedy, head"]["kernels"][: len(wanted)] == wanted
    assert steps["greedy, head"]["received_bytes"] == steps["greedy"]["received_bytes"]


def test_what_comes_back_of_a_step_is_its_tokens(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["greedy"]["received_bytes"] == 2 * 2 * 8
    reported = 4 + 3 * (4 + 4)  # a chosen token's log probability, and the likeliest with theirs
    assert steps["all kinds"]["received_bytes"] == (7 + 8) * 8 + 2 * reported
    assert max(step["sent_bytes"] for step in steps.values()) < 1 << 15
