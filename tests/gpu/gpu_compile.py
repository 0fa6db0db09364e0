"""Compile kernels beforehand, in as many processes as there are cores: Triton keeps what it compiled on disk.

Each job runs what a later section runs, once: so it compiles just that.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import gpu_attention
import gpu_coded
import gpu_states
import torch
from gpu_device import Device, device_of
from gpu_engine import FAMILIES, small_runner
from gpu_models import QWEN3_0_6B, QWEN3_8B, Engine, Shape, config_of, limits_of, random_model
from gpu_report import Case, Row

from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.step import SampleSpec
from pdserve.kernels.cpu.library import library
from pdserve.protocol.sampling import SamplingParams

T = TypeVar("T")
Job = Callable[[Device], T]


@contextmanager
def pooled(device: Device, jobs: Sequence[Job[T]]) -> Iterator[list[Future[T]]]:
    """Run jobs in processes of their own, each with a device like this one. Those not begun at the end are dropped."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(device.num_processes(len(jobs)), context) as pool:
        try:
            yield [pool.submit(_run, job, device.is_dry) for job in jobs]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run(job: Job[T], is_dry: bool) -> T:
    return job(device_of(is_dry=is_dry))


def cases(device: Device) -> Iterator[Case]:
    """Compile the kernels of all sections but the checks. Engines come last: they meet much that is compiled then."""
    for jobs in (_kernels(device), _engines(device)):
        with pooled(device, list(jobs.values())) as compiled:
            for name, done in zip(jobs, compiled, strict=True):
                yield name, partial(_row, name, done)


def _row(name: str, done: Future[None]) -> list[Row]:
    done.result()
    return [Row(name)]


def _kernels(device: Device) -> dict[str, Job[None]]:
    of_kinds = (gpu_attention.prefill_loads, gpu_attention.decode_loads, gpu_attention.latent_loads)
    loads = [load for loads_of in of_kinds for load in loads_of(device)]
    jobs: dict[str, Job[None]] = {
        f"{load.name} {load.shape}": partial(_attention, load)
        for load in {(each.spec, each.tile, each.shape.size is None): each for each in loads}.values()
    }
    jobs["the CPU engine's library"] = _library
    jobs |= gpu_coded.jobs(device) | gpu_states.jobs(device)
    return jobs | {f"sampler {dtype}": partial(_sampler, dtype) for dtype in (torch.bfloat16, torch.float32)}


def _engines(device: Device) -> dict[str, Job[None]]:
    jobs: dict[str, Job[None]] = {
        name: partial(_engine, shape) for name, shape in (("0.6B", QWEN3_0_6B), ("8B", QWEN3_8B))
    }
    jobs |= {family: partial(_family, family) for family in FAMILIES}
    return device.sized(jobs, {name: jobs[name] for name in ("0.6B", next(iter(FAMILIES)))})


def _library(device: Device) -> None:
    library()  # of the engine that tokens are compared with


def _attention(load: gpu_attention.Load, device: Device) -> None:
    for call in gpu_attention.calls(device, load, num_layers=1):
        call()
    device.synchronize()


def _sampler(dtype: torch.dtype, device: Device) -> None:
    vocab_size = device.sized(151_936, 300)
    spec = SampleSpec(SamplingParams(repetition_penalty=2.0), 0, 0, (0,), (), forbid_stops=False, sequence=(0, 0))
    logits = torch.zeros((1, vocab_size), dtype=dtype, device=device.torch)
    KernelSampler((5,), vocab_size, 1, device.torch).sample(logits, [spec])
    device.synchronize()


def _engine(shape: Shape, device: Device) -> None:
    model = random_model(config_of(device, shape, num_layers=1), device)
    Engine.of(device, model, device.sized(limits_of(2, 2_048, 2_048), limits_of(1, 16, 32)), share=0.2)
    device.synchronize()


def _family(family: str, device: Device) -> None:
    small_runner(family, device.torch).capture()
    device.synchronize()
