"""On a GPU the mover's thread has the GPU's context before it does anything else, and NIXL has no thread of its own."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import nixl_cu12._bindings as nixl
import numpy as np
import pytest
import torch
from mover_settings import PAGE_BYTES

from pdserve.base.clock import new_incarnation
from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Peer, WorkerId
from pdserve.kvtransfer.backends import nixl as backends
from pdserve.kvtransfer.backends.nixl import NixlBackend, start_agent
from pdserve.kvtransfer.backends.ucx import Network
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region


def test_the_movers_thread_takes_the_gpus_context_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object, str]] = []

    def note(name: str, what: object) -> None:
        calls.append((name, what, threading.current_thread().name))

    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: note("set_device", gpu))
    monkeypatch.setattr(torch, "zeros", lambda _size, device: note("zeros", device))
    me = Peer(WorkerId("w"), new_incarnation())
    backend = NixlBackend(me, Region.of(np.zeros((4, PAGE_BYTES), np.uint8)), Network(), has_thread=False)
    backend.region = replace(backend.region, gpu=3)
    agent, connect = backend.agent, backend.agent.loadRemoteMD

    class Agent:
        def loadRemoteMD(self, metadata: bytes) -> bytes:  # noqa: N802 - NIXL's name
            note("loadRemoteMD", b"")
            return bytes(connect(metadata))

        def __getattr__(self, name: str) -> object:
            return getattr(agent, name)

    backend.agent = Agent()
    mover = Mover(backend, lambda _: None)
    try:
        with pytest.raises(ProtocolError):
            mover.attach(Peer(WorkerId("x"), new_incarnation()), mover.describe()[:-8] + bytes(8))
    finally:
        mover.close()
    first = [(name, what) for name, what, _ in calls[:3]]
    assert first == [("set_device", 3), ("zeros", "cuda:3"), ("loadRemoteMD", b"")]
    assert {thread for _, _, thread in calls} == {"mover-nixl"}


@pytest.mark.parametrize(("gpu", "has_thread"), [(None, True), (0, False)])
def test_nixl_has_a_thread_where_pages_are_in_the_hosts_memory_alone(
    gpu: int | None, has_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    bound: list[int] = []

    def start(name: str, network: Network, *, gpu: bool, has_thread: bool) -> nixl.nixlAgent:
        assert bound == ([] if gpu_of is None else [gpu_of]), "UCX looks for its ways to a GPU where one is current"
        asked.append(has_thread)
        return start_agent(name, network, gpu=gpu, has_thread=has_thread)

    gpu_of = gpu
    monkeypatch.setattr(backends, "start_agent", start)
    monkeypatch.setattr(backends, "bind_thread", bound.append)
    region = replace(Region.of(np.zeros((4, PAGE_BYTES), np.uint8)), gpu=gpu)
    me = Peer(WorkerId("w"), new_incarnation())
    try:
        NixlBackend(me, region, Network()).close(in_flight=False)
    except backends._ERRORS:
        assert gpu == 0, "the memory is no GPU's"
    assert asked == [has_thread]


def test_nixl_for_the_newer_cuda_is_taken_where_it_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "nixl_cu13"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_bindings.py").write_text("from nixl_cu12._bindings import *\n")
    code = "import pdserve.kvtransfer.backends.nixl as found; print(found.nixl.__name__)"
    for environment, expected in (
        ({"PYTHONPATH": str(tmp_path)}, "nixl_cu13"),
        ({}, backends.nixl.__name__.partition(".")[0]),
    ):
        command = [sys.executable, "-P", "-c", code]
        named = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
        assert named.stdout == f"{expected}._bindings\n"
