"""Where a step's time goes: device, host, and the gaps between.

The device's part is what its kernels run, as the profiler sees them; the host's parts are measured while steps overlap
as they do in a worker. The idle gap is what the device does nothing: the time of a step less that of its kernels.
"""

from collections.abc import Iterator
from functools import partial

from gpu_device import Device
from gpu_models import QWEN3_0_6B, QWEN3_8B, Driven, Engine, config_of, drive, limits_of, random_model
from gpu_report import Case, Row
from gpu_throughput import GREEDY, equal_work

from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import StepPlan

LIMITS = limits_of(256, max_num_batched_tokens=8_192, max_model_len=2_048)
DRY_LIMITS = limits_of(2, max_num_batched_tokens=32, max_model_len=64)
TIMED_STEPS = 50
CONTEXT = 600
ANSWER = 150  # more than the steps in which prompts come, and those that are timed
TOP_KERNELS = 6
SHOWN_NAME = 28


def cases(device: Device) -> Iterator[Case]:
    for name, shape in device.sized((("0.6B", QWEN3_0_6B), ("8B", QWEN3_8B)), (("dry", QWEN3_8B),)):
        engine = Engine.of(device, random_model(config_of(device, shape), device), device.sized(LIMITS, DRY_LIMITS))
        for num_seqs in device.sized((1, 64, 256), (2,)):
            yield f"{name} decode {num_seqs}", partial(_decode, device, engine, name, num_seqs)
        yield f"{name} prefill", partial(_prefill, device, engine, name)
        del engine
        device.empty()


def _decode(device: Device, engine: Engine, name: str, num_seqs: int) -> Iterator[Row]:
    """Compute the prompts of some sequences, then time steps in which all of them decode."""
    num_steps, scheduler = device.sized(TIMED_STEPS, 2), engine.scheduler()
    work = equal_work(num_seqs, device.sized(CONTEXT, 5), device.sized(ANSWER, 6), 250)
    prompts = list(work.sequences(GREEDY))
    drive(engine.runner, scheduler, prompts, 1, is_over=lambda driven: len(driven.texts) == num_seqs)
    driven = drive(engine.runner, scheduler, [], 2, is_over=lambda driven: driven.num_steps >= num_steps)
    plan = _next_plan(scheduler)
    assert plan.num_tokens == num_seqs, "not all of them decode"
    kernels = device.kernel_us(lambda: engine.runner.run(plan))
    yield _row(f"{name} decode {num_seqs}", driven, kernels)
    yield _top(f"{name} decode {num_seqs}: kernels", kernels)


def _prefill(device: Device, engine: Engine, name: str) -> Iterator[Row]:
    """Compute prompts, one a step: each planned when the one before it is over, then each planned ahead."""
    length, count = device.sized((2_000, 12), (20, 2))
    work = equal_work(count, length, 1, 250)
    engine.drive(work.sequences(GREEDY), depth=1)  # compiles what capturing did not
    scheduler = engine.scheduler()
    scheduler.add(next(work.sequences(GREEDY)))
    plan = _next_plan(scheduler)
    kernels = device.kernel_us(lambda: engine.runner.run(plan))
    for depth, how in ((1, "one by one"), (2, "planned ahead")):
        scheduler = engine.scheduler()
        scheduler.step_tokens = length
        yield _row(
            f"{name} prefill {length}, {how}", drive(engine.runner, scheduler, work.sequences(GREEDY), depth), kernels
        )
    yield _top(f"{name} prefill {length}: kernels", kernels)


def _next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def _row(name: str, driven: Driven, kernels: dict[str, float]) -> Row:
    device_ms, steps = sum(kernels.values()) / 1e3, 1e-3 * driven.num_steps
    step_ms = driven.total_s / steps
    host_s = driven.planning_s + driven.launching_s + driven.committing_s
    figures = {
        "ms a step": step_ms,
        "ms device": device_ms,
        "ms idle": step_ms - device_ms,
        "ms host": host_s / steps,
        "ms plan": driven.planning_s / steps,
        "ms launch": driven.launching_s / steps,
        "ms wait": driven.waiting_s / steps,
        "ms commit": driven.committing_s / steps,
    }
    return Row(name, figures)


def _top(name: str, kernels: dict[str, float]) -> Row:
    """Return the kernels that take longest."""
    longest = list(kernels.items())[:TOP_KERNELS]
    return Row(name, {f"us {kernel[:SHOWN_NAME]}": time_us for kernel, time_us in longest}, f"{len(kernels)} kernels")
