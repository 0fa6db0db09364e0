"""Loads a follower's part of the model in its process, beside rank 0, which has checked and chosen all before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.features import Features
from pdserve.engine.runner import RankPages, Runner
from pdserve.executor.device_ranks import DeviceFollower
from pdserve.executor.draft_loading import open_divided, with_room
from pdserve.executor.form import KERNEL_DEVICES, Form, choose_form, choose_kv_code, load_form
from pdserve.executor.kernel_checks import choose_interpreter
from pdserve.executor.layouts import layout_of
from pdserve.executor.loading import fitting_of
from pdserve.executor.node_ranks import NodeRanks, join_group
from pdserve.executor.rank_frames import Ended, Kept, OwnPages, Pages, Setup, Step, keep_states, plan_of
from pdserve.executor.rank_memory import mapped_pages, new_pages, region_of
from pdserve.executor.rank_sums import Ranks, ranks_of
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kvtransfer.region import Region
from pdserve.model.taps import behind_all
from pdserve.model.weights import Rank
from pdserve.net.frames import Channel
from pdserve.settings.config import WorkerConfig

Follow = Callable[[Step], None]  # and tells rank 0 that the part has ended


def load_follower(config: WorkerConfig, setup: Setup, channel: Channel) -> tuple[Follow, Region | None]:
    """Return what does the rank's part of a step, and its pages where they are its own. channel: to rank 0."""
    checkpoint = open_checkpoint(Path(setup.model))
    if config.device in KERNEL_DEVICES:
        choose_interpreter(config.device)
        head = open_divided(config, checkpoint)
        form = choose_form(config, with_room(checkpoint, head), setup.weights_hash)
        model = form.checkpoint.config
        layout = layout_of(config, model, form.dtype, form.weights_hash)
        fitting = fitting_of(config, (form.checkpoint, head), layout, setup.num_pages)
        follower = DeviceFollower(config, (form, head), fitting, setup, channel)
        return follower.follow, follower.region
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, num_head_layers=setup.num_head_layers))
    form = choose_form(config, checkpoint, setup.weights_hash)
    runner, ranks, region = _load_on_cpu(config, setup, form, channel)

    def follow(step: Step) -> None:
        runner.follow(plan_of(step))
        ranks.check()
        if runner.has_states:
            keep_states(runner, channel.receive(Kept))
        channel.send(Ended())

    return follow, region


def _load_on_cpu(
    config: WorkerConfig, setup: Setup, form: Form, channel: Channel
) -> tuple[Runner, Ranks | NodeRanks, Region | None]:
    """Return the rank's runner, what it adds with, and its pages where they are its own.

    RuntimeError if only one of the two has a compiled library: they would wait for each other in the first sum.
    """
    loaded = library()
    if isinstance(loaded, Missing) and setup.has_library:
        raise RuntimeError(f"rank 0 has a compiled library, and this one has none: {loaded}")
    if not isinstance(loaded, Missing) and not setup.has_library:
        raise RuntimeError("rank 0 has no compiled library, and this one has one")
    assert setup.num_pages is not None, "ranks on CPUs know how many pages the host's memory holds"
    rank, ranks = Rank.at(setup.index, config.degrees), None
    if setup.slots is not None:
        ranks = ranks_of(rank, mapped_pages(setup.slots), [channel], config.stalled_step_s)
    meeting = NodeRanks(rank, setup.host)
    model = load_form(config, form, meeting.device, ranks or meeting)
    region = None
    if isinstance(setup.pages, OwnPages):
        memory = mapped_pages(new_pages(setup.num_pages * setup.pages.page_bytes))
        region = region_of(memory, setup.pages)
    else:
        memory = mapped_pages(setup.pages)
    pages = RankPages(memory, are_own=region is not None, are_recorded=ranks is not None)
    code = choose_kv_code(config.kv_cache_dtype, model.config)
    runner = Runner(model, setup.num_pages, config.page_size, pages=pages, code=code)
    guessed = config.speculative_config
    if guessed is not None and guessed.method == "mtp":  # rank 0 reads the last layer of all tokens
        taps = behind_all(model.config.num_layers)
        runner.keep(Features(taps, setup.num_pages, runner.groups[0].page_size))
    if ranks is None:
        channel.send(Ended())
        channel.receive(Pages)
        join_group(meeting, None, channel, config.stalled_step_s)
    return runner, ranks or meeting, region
