"""One prefill and one decode worker on one device, in a process each: pages go from one's memory to the other's.

What the pair computes must be what one engine computes. Each sequence is alone in its steps, so that both add up alike.
"""

import multiprocessing
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gpu_half
from gpu_device import Device
from gpu_half import Pages
from gpu_report import Case, Row

from pdserve.base.ids import PageId

READY_S, ANSWER_S = 120.0, 120.0
RATE_BYTES = 1 << 30
REPEATS = 5
HANDOFFS, PAGES_EACH = 1000, 8
BESIDE_S = 5.0


def nixl(device: Device) -> Iterator[Case]:
    """Move pages with NIXL, where it is installed."""
    if (note := _missing("nixl_cu13", "nixl_cu12")) is not None:
        yield "nixl", lambda: [Row("nixl", note=note)]
        return
    with Pair.of(device, "nixl") as pair:
        yield "lane", lambda: [_rate(device, pair, "nixl")]
        yield "tokens", lambda: [_tokens_agree(device, pair)]
        yield "decoding beside transfers", lambda: [_beside(device, pair)]
        yield "many hand-offs", lambda: [_many(device, pair)]


def gloo(device: Device) -> Iterator[Case]:
    """Move pages with gloo, through the host's memory."""
    if (note := _missing()) is not None:
        yield "gloo", lambda: [Row("gloo", note=note)]
        return
    with Pair.of(device, "gloo") as pair:
        yield "lane", lambda: [_rate(device, pair, "gloo")]


def _missing(*one_of: str) -> str | None:
    """Return why movers cannot be run: what each needs is missing, or all of a few packages; None if they can be."""
    for packages in (("psutil",), ("xxhash",), one_of):
        if packages and not any(map(find_spec, packages)):
            return f"skipped: {' or '.join(packages)} is not installed"
    return None


class Half:
    """A worker's process, seen from outside."""

    def __init__(self, device: Device, name: str, kind: str, folder: Path) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.name, self.log = name, folder / f"{name}.log"
        self._pipe: Connection
        self._pipe, theirs = spawning.Pipe()
        arguments = (theirs, name, kind, device.is_dry, str(self.log))
        self._process = spawning.Process(target=gpu_half.serve, args=arguments)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until it serves."""
        self.peer, self.description, self.num_pages, self.page_bytes = self.answer(READY_S)

    def begin(self, method: str, *arguments: object) -> None:
        self._pipe.send((method, arguments))

    def answer(self, timeout_s: float = ANSWER_S) -> Any:  # noqa: ANN401 - each method has its own result
        """Return the result; RuntimeError if it failed, or its process has ended."""
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"{self.name} does not answer")
        try:
            is_well, result = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise RuntimeError(f"{self.name}: its process has ended with status {self._process.exitcode}") from None
        if not is_well:
            raise RuntimeError(result)
        return result

    def ask(self, method: str, *arguments: object) -> Any:  # noqa: ANN401
        self.begin(method, *arguments)
        return self.answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        with suppress(ValueError):
            self._process.kill()
        self._process.join()


class Pair:
    """A prefill worker attached to a decode worker."""

    def __init__(self, prefill: Half, decode: Half) -> None:
        self.prefill, self.decode = prefill, decode

    @classmethod
    @contextmanager
    def of(cls, device: Device, kind: str) -> Iterator["Pair"]:
        with tempfile.TemporaryDirectory() as folder:  # for UCX's logs, which are kept where OUT names a place
            halves = [Half(device, name, kind, Path(folder)) for name in ("prefill", "decode")]
            try:
                for half in halves:
                    half.ready()
                halves[0].ask("attach", halves[1].peer, halves[1].description)
                yield cls(*halves)
            finally:
                for half in halves:
                    half.close()
                    if "OUT" in os.environ and half.log.exists():
                        shutil.copy(half.log, Path(os.environ["OUT"], f"{kind}-{half.name}.log"))

    def send(self, src: Pages, dst: Pages) -> tuple[tuple[int, ...], float]:
        digests, seconds = self.prefill.ask("send", self.decode.peer, src, dst)
        return digests, seconds

    def is_whole(self, pages: Pages, digests: tuple[int, ...]) -> bool:
        return self.decode.ask("first_mismatch", pages, digests) is None


def _rate(device: Device, pair: Pair, kind: str) -> Row:
    """Write many pages; say how fast that was, and by which lane."""
    half = pair.prefill
    count = max(1, min(half.num_pages // 2, device.sized(RATE_BYTES, 1 << 16) // half.page_bytes))
    pages = _pages(0, count)
    took = [pair.send(pages, pages) for _ in range(REPEATS)]
    seconds = statistics.median(each for _, each in took)
    figures = {"GB/s": 1e-9 * count * half.page_bytes / seconds, "pages": count, "bytes a page": half.page_bytes}
    figures |= {f"probe {name}": value for name, value in half.ask("probe", pair.decode.peer).items()}
    is_whole = pair.is_whole(pages, took[-1][0])
    lanes = gpu_half.write_lanes(half.log)
    is_slow = bool(lanes) and not device.is_dry and not any(lane.startswith("cuda_ipc") for lane in lanes)
    note = f"UCX writes by {'; '.join(lanes) or 'no lane'}"
    return Row(f"{kind}: copy", figures, note, failed=is_slow or not is_whole)


def _tokens_agree(device: Device, pair: Pair) -> Row:
    lens, num_tokens = device.sized(((1, 63, 64, 500, 1500), 32), ((5, 20), 3))
    wrong = []
    for order, length in enumerate(lens):
        prompt = pair.prefill.ask("prompt", length, order)
        wanted = pair.prefill.ask("alone", order, prompt, num_tokens)
        first, src = pair.prefill.ask("prefill", order, prompt, num_tokens)
        dst = pair.decode.ask("reserve", len(src))
        digests, _ = pair.send(src, dst)
        pair.prefill.ask("release", order)
        is_whole = pair.is_whole(dst, digests)
        found = pair.decode.ask("continue_with", order, prompt, first, dst, num_tokens)
        if not is_whole or found != wanted:
            wrong.append(length)
    note = f"prompts of {wrong} differ" if wrong else f"{len(lens)} sequences of {num_tokens} tokens agree"
    return Row("tokens beside one engine's", note=note, failed=bool(wrong))


def _beside(device: Device, pair: Pair) -> Row:
    """Decode alone, then while pages of other sequences land."""
    num_seqs, num_tokens = device.sized((16, 300), (1, 3))
    alone_ms, seconds = pair.decode.ask("decode", num_seqs, num_tokens)
    pages = _pages(0, device.sized(PAGES_EACH, 1))
    dst = pair.decode.ask("reserve", len(pages))
    pair.decode.begin("decode", num_seqs, num_tokens)
    count = pair.prefill.ask("send_for", pair.decode.peer, pages, dst, min(BESIDE_S, seconds))
    beside_ms, _ = pair.decode.answer()
    gigabytes = 1e-9 * count * len(pages) * pair.prefill.page_bytes / min(BESIDE_S, seconds)
    figures = {"ms a token": alone_ms, "ms beside transfers": beside_ms, "GB/s meanwhile": gigabytes}
    return Row(f"decode {num_seqs} beside transfers", figures, f"{count} transfers")


def _many(device: Device, pair: Pair) -> Row:
    """Hand pages off again and again, others each time; each is checked before the next is written."""
    count, each = device.sized((HANDOFFS, PAGES_EACH), (20, 2))
    took, wrong, num_pages = [], 0, pair.prefill.num_pages
    for number in range(count):
        src, dst = (_pages(number * step, each, num_pages) for step in (each, each + 1))
        digests, seconds = pair.send(src, dst)
        took.append(seconds)
        wrong += not pair.is_whole(dst, digests)
    figures = {"ms median": 1e3 * statistics.median(took), "ms at most": 1e3 * max(took)}
    return Row(f"{count} hand-offs of {each} pages", figures, f"{wrong} wrong", failed=bool(wrong))


def _pages(first: int, count: int, num_pages: int | None = None) -> Pages:
    return tuple(PageId((first + place) % num_pages if num_pages else first + place) for place in range(count))
