"""How an 8B model's pages share the device's memory, and whether the largest step keeps within what is set aside."""

from collections.abc import Iterator

from gpu_device import Device
from gpu_models import QWEN3_8B, Engine, config_of, kv_bytes_per_token, limits_of, random_model
from gpu_report import Case, Row

from pdserve.base.ids import PageId
from pdserve.engine.gpu_memory import step_bytes
from pdserve.engine.step import Chunk, SampleSpec, StepPlan
from pdserve.protocol.sampling import SamplingParams

LONG, CHUNK, SEQS = 131_072, 2_048, 256
GIB = 1 << 30


def cases(device: Device) -> Iterator[Case]:
    """Run one step with `CHUNK` tokens of a prompt at its end, beside as many sequences as there may be."""
    yield "largest step", lambda: [_largest_step(device)]


def _largest_step(device: Device) -> Row:
    long, chunk, seqs = device.sized((LONG, CHUNK, SEQS), (64, 16, 2))
    config = config_of(device, {**QWEN3_8B, "max_position_embeddings": LONG})
    before = device.memory()
    model = random_model(config, device)
    with_model = device.memory()
    limits = limits_of(seqs, chunk + seqs, long)
    page_size = device.sized(64, 16)
    needed = step_bytes(model, limits)
    page_bytes = kv_bytes_per_token(config) * page_size
    fit = with_model.pages_that_fit(0.9, device.sized(needed, 0), page_bytes)
    device.forget_peak()
    engine = Engine.of(device, model, limits)
    plan = _plan(long, chunk, seqs, page_size, engine.num_pages)
    engine.runner.run(plan)
    grown = device.peak_bytes() - with_model.reserved - engine.num_pages * page_bytes  # graphs and tables, too
    figures = {
        "GiB in all": before.total / GIB,
        "GiB free at first": before.free / GIB,
        "GiB model": (before.free - with_model.free) / GIB,
        "pages fit": fit,
        "GiB of pages": fit * page_bytes / GIB,
        "GiB left free": device.memory().free / GIB,
        "GiB set aside for a step": needed / GIB,
        "GiB beside pages at most": grown / GIB,
    }
    note = f"{chunk} tokens at {long}, beside {seqs - 1} single ones"
    return Row("largest step of 8B", figures, note, failed=grown > needed or fit <= 0)


def _plan(long: int, chunk: int, seqs: int, page_size: int, num_pages: int) -> StepPlan:
    """Return a step whose sequences all read the same pages, and write to some that none reads."""
    spec = SampleSpec(SamplingParams(temperature=0.0), 0, 0, (), (), forbid_stops=False, sequence=(0, 0))
    length = long // page_size
    pages = tuple(PageId(page % num_pages) for page in range(length))
    single = tuple(Chunk((7,), page_size - 1, (PageId(row % num_pages),), (spec,)) for row in range(seqs - 1))
    return StepPlan((*single, Chunk((7,) * chunk, long - chunk, pages, (spec,))))
