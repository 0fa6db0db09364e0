"""Sampling as the engine asks for it, on logits of a large vocabulary: what the device does, and what the host does."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice

import torch
from gpu_device import Device
from gpu_models import random_prompt
from gpu_report import Case, Row

from pdserve.engine.sampler_triton import KernelSampler
from pdserve.engine.step import SampleSpec
from pdserve.protocol.sampling import SamplingParams

VOCAB, DRY_VOCAB = 151_936, 500
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 500
HOST_CALLS = 20
WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "free": SamplingParams(temperature=0.8),
    "top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5),
}


def cases(device: Device) -> Iterator[Case]:
    vocab_size = device.sized(VOCAB, DRY_VOCAB)
    sizes = device.sized((1, 64, 256), (2,))
    sampler = KernelSampler((vocab_size - 1,), vocab_size, sizes[-1], device.torch)
    for num_rows in sizes:
        logits = (torch.randn((num_rows, vocab_size), device=device.torch) * 3).bfloat16()
        for name, params in WAYS.items():
            specs = [_spec(device, row, params, vocab_size) for row in range(num_rows)]
            yield name, partial(_sample, device, sampler, logits, specs, f"{num_rows} rows, {name}")


def _spec(device: Device, row: int, params: SamplingParams, vocab_size: int) -> SampleSpec:
    lens = device.sized((PROMPT_TOKENS, OUTPUT_TOKENS), (9, 5)) if params.has_penalties else (0, 0)
    prompt, output = (random_prompt(length, vocab_size, 2 * row + which) for which, length in enumerate(lens))
    return SampleSpec(params, row, len(output), prompt, output, forbid_stops=False, sequence=(0, row))


def _steps(specs: list[SampleSpec]) -> Iterator[list[SampleSpec]]:
    """Yield the samples of one step after another, each planned while the one before it is computed."""
    yield specs
    for ahead in count(1):
        yield [replace(spec, index=spec.index + ahead, lacks_output=True) for spec in specs]


def _sample(
    device: Device, sampler: KernelSampler, logits: torch.Tensor, specs: list[SampleSpec], name: str
) -> list[Row]:
    steps = _steps(specs)
    kernels = device.kernel_us(lambda: sampler.sample(logits, next(steps)))
    timed = list(islice(steps, device.sized(HOST_CALLS, 1)))
    started_s = time.perf_counter()
    for step in timed:
        sampler.sample(logits, step)
    host_us = (time.perf_counter() - started_s) * 1e6 / len(timed)
    device.synchronize()
    largest = {f"us {kernel[:28]}": time_us for kernel, time_us in list(kernels.items())[:3]}
    return [Row(name, {"us device": sum(kernels.values()), "us host": host_us, **largest})]
