"""What sections run in a process of its own: two steps, or a start from nothing to the first prompt.

    python3 tests/gpu/gpu_alone.py steps|start [--dry]

Prints what it took as a line of JSON.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import run_gpu

if TYPE_CHECKING:
    from gpu_device import Device

STARTED_S = time.perf_counter()


def main(arguments: Sequence[str]) -> None:
    """Do what the first argument names."""
    run_gpu.find_package()
    from gpu_device import device_of  # noqa: PLC0415 - only now importable

    device = device_of(is_dry="--dry" in arguments)
    found = {"start": _start, "steps": _steps}[arguments[0]](device)
    sys.stdout.write(json.dumps(found) + "\n")


def _steps(device: "Device") -> dict[str, float]:
    """Compute a step of single tokens, and one with a chunk beside them, with the heads of an 8B model.

    Nothing is captured: where torch's allocator keeps no memory, graphs cannot be.
    """
    from gpu_models import QWEN3_8B, Engine, config_of, limits_of, random_model, replay_nothing, step_of  # noqa: PLC0415

    small = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 4096, "num_hidden_layers": 1}
    model = random_model(config_of(device, {**QWEN3_8B, **small}), device)
    engine = Engine.of(device, model, limits_of(4, 256, 2_048), share=0.2, captures=False)
    replay_nothing(engine.runner)
    steps = {"decode": [1, 1, 1], "mixed": [1, 1, device.sized(200, 5)]}
    plans = {name: step_of(engine, counts, context=device.sized(300, 5)) for name, counts in steps.items()}
    return {f"tokens of the {name} step": len(engine.runner.run(plan).tokens) for name, plan in plans.items()}


def _start(device: "Device") -> dict[str, float]:
    """Load a 0.6B model, get ready, and compute two prompts; return the seconds of each."""
    from gpu_models import QWEN3_0_6B, Engine, config_of, limits_of, random_model, step_of  # noqa: PLC0415

    imported_s = time.perf_counter()
    model = random_model(config_of(device, QWEN3_0_6B), device)
    device.synchronize()
    loaded_s = time.perf_counter()
    limits = device.sized(limits_of(256, 8_192, 2_048), limits_of(1, 16, 32))
    engine = Engine.of(device, model, limits, share=0.5)
    device.synchronize()
    ready_s = time.perf_counter()
    plan = step_of(engine, [device.sized(1_000, 5)], context=0)
    took = []
    for _ in range(2):
        before_s = time.perf_counter()
        engine.runner.run(plan)
        took.append(time.perf_counter() - before_s)
    return {
        "s importing": imported_s - STARTED_S,
        "s loading": loaded_s - imported_s,
        "s getting ready": ready_s - loaded_s,
        "s first prompt": took[0],
        "s second prompt": took[1],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
