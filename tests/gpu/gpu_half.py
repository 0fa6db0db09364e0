"""One worker of a pair, in a process of its own: an engine, and a mover that writes its pages into the other's.

It does what the other process asks, one thing after another. The mover has a thread of its own meanwhile.
"""

import os
import queue
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gpu_device import Device, device_of
from gpu_models import QWEN3_0_6B, Engine, config_of, drive, limits_of, random_model, random_prompt, sequence_of

from pdserve.base.ids import Attempt, AttemptKey, PageId, Peer, RequestId, WorkerId
from pdserve.engine.sequence import Sequence
from pdserve.protocol.page_tables import PageTables
from pdserve.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from pdserve.kvtransfer.backends.backend import Backend
    from pdserve.kvtransfer.doors import CopyStopped, ReceiverMessage
    from pdserve.kvtransfer.region import Region

SHARE = 0.4  # of the device's memory, for each of two
STOPPED_S = 60.0  # longest wait for a copy
LIMITS, DRY_LIMITS = limits_of(32, 8_192, 2_048), limits_of(4, 32, 64)
Pages = tuple[PageId, ...]


def serve(pipe: Connection, name: str, kind: str, is_dry: bool, log: str) -> None:
    """Do what is asked over the pipe until it ends: ("method", arguments) brings (True, result) or (False, why)."""
    os.environ.update({"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": log})  # UCX says by which lane bytes go, and only there
    half = Half(device_of(is_dry=is_dry), name, kind)
    pipe.send((True, half.describe()))
    with suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(half, method)(*arguments)))
            except Exception as error:  # noqa: BLE001 - it is raised over there
                traceback.print_exc()
                pipe.send((False, f"{name}.{method}: {type(error).__name__}: {error}"))
    half.close()


class Half:
    """A prefill or a decode worker: what is particular to a role is asked of that one alone."""

    def __init__(self, device: Device, name: str, kind: str) -> None:
        from pdserve.base.clock import new_incarnation  # noqa: PLC0415 - imports what only a mover needs
        from pdserve.kvtransfer.device_region import device_region  # noqa: PLC0415
        from pdserve.kvtransfer.mover import Mover  # noqa: PLC0415

        device.limit_share(SHARE)
        config = config_of(device, QWEN3_0_6B)
        self._device = device
        self._vocab_size = config.vocab_size
        self._engine = Engine.of(device, random_model(config, device), device.sized(LIMITS, DRY_LIMITS), SHARE)
        self._scheduler = self._engine.scheduler()
        self._sequences: dict[int, Sequence] = {}
        kv = self._engine.runner.kv
        kv.normal_()
        device.synchronize()
        self._region = device_region(kv.view(torch.uint8).view(len(kv), -1))
        self._me = Peer(WorkerId(name), new_incarnation())
        self._stopped: queue.SimpleQueue[ReceiverMessage] = queue.SimpleQueue()
        self._mover = Mover(_backend(kind, self._me, self._region), self._stopped.put)

    def describe(self) -> tuple["Peer", bytes, int, int]:
        """Return who it is, what it takes to write here, and how many pages of how many bytes it has."""
        return self._me, self._mover.describe(), self._region.num_pages, self._region.page_bytes

    def close(self) -> None:
        self._mover.close()

    # ---- pages

    def attach(self, peer: Peer, description: bytes) -> None:
        self._mover.attach(peer, description)

    def probe(self, peer: Peer) -> dict[str, float]:
        speed = self._mover.probe(peer).result(timeout=STOPPED_S)
        return {name: value for name in speed.__slots__ if isinstance(value := getattr(speed, name), float)}

    def send(self, peer: Peer, src: Pages, dst: Pages) -> tuple[tuple[int, ...], float]:
        """Write pages into the peer's; return their digests and the seconds that took."""
        started_s = time.perf_counter()
        self._mover.write(peer, AttemptKey(RequestId(bytes(16)), Attempt(0)), src, dst)
        stopped: CopyStopped = self._stopped.get(timeout=STOPPED_S).event  # type: ignore[assignment]
        if stopped.digests is None:
            raise RuntimeError(stopped.reason)
        return stopped.digests, time.perf_counter() - started_s

    def send_for(self, peer: Peer, src: Pages, dst: Pages, seconds: float) -> int:
        """Write the same pages again and again; return how often."""
        until_s, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < until_s:
            self.send(peer, src, dst)
            count += 1
        return count

    def first_mismatch(self, pages: Pages, digests: tuple[int, ...]) -> int | None:
        return self._region.first_mismatch(pages, digests)

    # ---- sequences

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        return random_prompt(length, self._vocab_size, seed)

    def alone(self, order: int, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """Compute an answer by itself, without any hand-off."""
        sequence = sequence_of(order, prompt, _greedy(num_tokens))
        return drive(self._engine.runner, self._scheduler, [sequence], 1).texts[order]

    def prefill(self, order: int, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, Pages]:
        """Compute a prompt and its first token, and keep its pages."""
        sequence = sequence_of(order, prompt, _greedy(num_tokens), stop_after_prompt=True)
        driven = drive(self._engine.runner, self._scheduler, [sequence], 1)
        self._sequences[order] = sequence
        return driven.texts[order][0], sequence.pages.held

    def release(self, order: int) -> None:
        self._scheduler.release(self._sequences.pop(order))

    def reserve(self, num_pages: int) -> Pages:
        pages = self._scheduler.cache.take(num_pages)
        assert pages is not None, "no pages are left"
        return pages

    def continue_with(
        self, order: int, prompt: tuple[int, ...], first: int, pages: Pages, num_tokens: int
    ) -> list[int]:
        """Compute the rest of an answer whose prompt has landed in `pages`."""
        sequence = sequence_of(order, prompt, _greedy(num_tokens))
        sequence.tokens.append(first)
        sequence.pages, sequence.computed, sequence.has_run = PageTables((list(pages),)), len(prompt), True
        self._scheduler.join(sequence)
        return [first, *drive(self._engine.runner, self._scheduler, [], 2).texts.get(order, [])]

    def decode(self, num_seqs: int, num_tokens: int) -> tuple[float, float]:
        """Decode sequences of its own; return the milliseconds a token took, and the seconds of it all."""
        prompt_len = self._device.sized(500, 5)
        works = [sequence_of(n, self.prompt(prompt_len, n), _greedy(num_tokens)) for n in range(num_seqs)]
        driven = drive(self._engine.runner, self._scheduler, works, 2)
        return driven.tpot_ms, driven.total_s


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _backend(kind: str, me: "Peer", region: "Region") -> "Backend":
    if kind == "nixl":
        from pdserve.kvtransfer.backends.nixl import NixlBackend  # noqa: PLC0415
        from pdserve.kvtransfer.backends.ucx import Network  # noqa: PLC0415

        return NixlBackend(me, region, Network(), has_thread=False)  # as on a GPU, in a dry run too
    from pdserve.kvtransfer.backends.collective import CollectiveBackend  # noqa: PLC0415
    from pdserve.kvtransfer.backends.pairing import Meeting  # noqa: PLC0415

    return CollectiveBackend(me, region, Meeting(b"s" * 32), staged=True)


def write_lanes(log: Path) -> list[str]:
    """Return how UCX says it writes large runs into another process's memory: the lane, and in what way.

    UCX prints a table for each kind of operation. Two lines name the endpoint and the operation, then come ranges of
    sizes: "| 0..inf | zero-copy | cuda_ipc/cuda |".
    """
    found: dict[str, None] = {}
    endpoint, title = "", ""
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        match [cell.strip() for cell in line.split("|")[1:-1]]:
            case [text]:
                endpoint, title = title, text
            case [sizes, way, lane] if sizes.endswith("inf") and "remote memory write" in title:
                if " self " not in endpoint:
                    found[f"{lane}, {way}"] = None
    return list(found)
