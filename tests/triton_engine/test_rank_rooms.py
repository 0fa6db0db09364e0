"""How many pages ranks with a device each have: as many as the device with the least room holds."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import worker_config
from model_zoo import write_model

from pdserve.engine.gpu_memory import GROUP_BYTES, step_bytes
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits
from pdserve.executor import followers
from pdserve.executor.device_ranks import DeviceFollower, Fitting, load_on_devices
from pdserve.executor.form import choose_form, load_form
from pdserve.executor.layouts import describe_layout
from pdserve.executor.loading import fitting_of
from pdserve.executor.rank_frames import Ended, Setup
from pdserve.executor.rank_group import GroupRanks
from pdserve.executor.rank_memory import own_layout
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.settings.config import WorkerConfig
from pdserve.worker.boot import open_model


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    folder = write_model("llama3", tmp_path, num_hidden_layers=1)
    return worker_config(folder, device="interpreter", tensor_parallel_size=2)


class ThreadOfRank:
    """In place of a rank's process: a thread of this one, which loads its part and computes nothing."""

    def __init__(self, connected: socket.socket, config: WorkerConfig, fitting: Fitting) -> None:
        self.made: list[DeviceFollower] = []
        self._channel, self._given = Channel(connected), (config, fitting)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        config, fitting = self._given
        setup = self._channel.receive(Setup)
        form = choose_form(config, open_model(config), setup.weights_hash)
        self.made.append(DeviceFollower(config, (form, None), fitting, setup, self._channel))
        self._channel.send(Ended())
        with pytest.raises(EOFError):
            self._channel.receive(Ended)
        self._channel.close()

    def wait(self, timeout_s: float | None = None) -> int:
        self._thread.join(timeout_s)
        return 0


@pytest.mark.parametrize("rooms", [(11, 9), (9, 11)])
def test_all_ranks_have_as_many_pages_as_fit_on_the_device_with_the_least_room(
    config: WorkerConfig, rooms: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = choose_form(config, open_model(config))
    described = describe_layout(form.checkpoint.config, form.weights_hash, config.page_size, form.dtype, config.device)
    layout = own_layout(form.checkpoint.config, described, config.degrees)
    fitting = fitting_of(config, (form.checkpoint, None), layout, None)
    first, second = (replace(fitting, room=lambda *_, room=room: room) for room in rooms)
    started: list[ThreadOfRank] = []

    def start(*_: int | None) -> tuple[ThreadOfRank, socket.socket]:
        own, theirs = socket.socketpair()
        started.append(ThreadOfRank(theirs, config, second))
        return started[0], own

    monkeypatch.setattr(followers, "start_rank", start)
    monkeypatch.setattr(CudaRunner, "capture", lambda runner, run: None)
    with ThreadPoolExecutor(1) as thread:
        executor, _, _ = load_on_devices(config, (form, None), first, thread, ("device", None), lambda _: None)
        (follower,) = started[0].made
        assert executor.region.num_pages == follower.region.num_pages == 9
        executor.close()


def test_a_step_of_one_of_several_ranks_has_room_for_what_ranks_exchange(config: WorkerConfig) -> None:
    form, limits = choose_form(config, open_model(config)), Limits(4, 64, 128, frozenset())
    part = load_form(config, form, torch.device("cpu"), GroupRanks(Rank.at(0, config.degrees), torch.device("cpu")))
    whole = load_form(config, form, torch.device("cpu"), None)
    gathered = 3 * limits.max_num_seqs * part.config.vocab_size * part.dtype.itemsize  # also by captured steps
    activations = (whole.activation_bytes() - part.activation_bytes()) * (64 + 2 * limits.max_num_seqs)
    assert step_bytes(part, limits) == step_bytes(whole, limits) - activations + GROUP_BYTES + gathered
