"""Loads a follower's part of the model in its process, beside rank 0, which has checked and chosen all before."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pdserve.checkpoint.open import open_checkpoint
from pdserve.engine.runner import Runner
from pdserve.executor.form import choose_form, load_form
from pdserve.executor.gloo_ranks import GlooRanks, common_store
from pdserve.executor.rank_frames import Setup
from pdserve.executor.shared_pages import mapped_pages
from pdserve.model.weights import Rank
from pdserve.settings.config import WorkerConfig


def load_follower(config: WorkerConfig, setup: Setup) -> tuple[Runner, Callable[[], None]]:
    """Return the rank's runner, and what connects it with the others, to be called once all have loaded."""
    ranks = GlooRanks(Rank(setup.index, setup.size), config.stalled_step_s)
    form = choose_form(config, open_checkpoint(Path(setup.model)), setup.weights_hash)
    model = load_form(config, form, torch.device("cpu"), ranks)
    runner = Runner(model, setup.num_pages, config.page_size, memory=mapped_pages(setup.pages))
    return runner, partial(ranks.meet, common_store(setup.store, setup.size))
