"""Loads a follower's part of the model in its process, beside rank 0, which has checked and chosen all before."""

from pathlib import Path

import torch

from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import RankPages, Runner
from pdserve.executor.form import choose_form, load_form
from pdserve.executor.rank_frames import Channel, Setup
from pdserve.executor.rank_memory import mapped_pages
from pdserve.executor.rank_sums import Ranks, ranks_of
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.model.weights import Rank
from pdserve.settings.config import WorkerConfig


def load_follower(config: WorkerConfig, setup: Setup, channel: Channel) -> tuple[Runner, Ranks]:
    """Return the rank's runner, and what it adds with. channel: to rank 0.

    RuntimeError if only one of the two has a compiled library: they would wait for each other in the first sum.
    """
    loaded = library()
    if isinstance(loaded, Missing) and setup.has_library:
        raise RuntimeError(f"rank 0 has a compiled library, and this one has none: {loaded}")
    if not isinstance(loaded, Missing) and not setup.has_library:
        raise RuntimeError("rank 0 has no compiled library, and this one has one")
    ranks = ranks_of(Rank.at(setup.index, config.degrees), mapped_pages(setup.slots), [channel], config.stalled_step_s)
    form = choose_form(config, open_checkpoint(Path(setup.model)), setup.weights_hash)
    model = load_form(config, form, torch.device("cpu"), ranks)
    pages = RankPages(mapped_pages(setup.pages), are_own=config.rank_memory == "own")
    runner = Runner(model, setup.num_pages, config.page_size, pages=pages)
    return runner, ranks
