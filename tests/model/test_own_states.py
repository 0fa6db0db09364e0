"""Ranks with memory of their own keep parts of states behind their KV heads, and answer as one with whole states."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts
from model_zoo import STATES, prompt
from thread_ranks import ThreadRanks, thread_ranks
from worker_settings import settings_of

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.checkpoint import Checkpoint
from pdserve.engine.runner import Runner
from pdserve.executor.form import in_parts
from pdserve.kernels.cpu.build import Missing, Reason
from pdserve.model.loading import load_model
from pdserve.settings.config import WorkerConfig
from pdserve.settings.degrees import Degrees

NUM_PAGES, NUM_TOKENS, CHUNK = 50, 10, 37
PROMPTS = [prompt(count, count) for count in (5, 45, 150)]
FOUR_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
FOUR_PARTS = {
    "qwen3.5": {**FOUR_HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "falcon-h1": {**FOUR_HEADS, "mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_n_groups": 1},
    "lfm2": FOUR_HEADS,
}

pytestmark = pytest.mark.usefixtures("one_thread")


def worker(path: Path, num_ranks: int) -> WorkerConfig:
    return settings_of(path, role="mixed", rank_memory="own", tensor_parallel_size=num_ranks)


def by_heads(ranks: ThreadRanks) -> torch.Tensor:
    """Return all pages with one KV head behind the other, from whichever ranks have them."""
    parts = [runner.kv.reshape(NUM_PAGES, runner.groups[0].num_kv_heads, -1) for runner in ranks.runners]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize(
    ("family", "sizes", "shape"),
    [
        *((family, (1, 2), {}) for family in STATES),
        *(pytest.param(family, (1, 2, 4), shape, id=f"{family}, 4") for family, shape in FOUR_PARTS.items()),
    ],
)
def test_ranks_with_parts_of_states_answer_as_one_with_whole_states(
    opened: Callable[..., Checkpoint],
    family: str,
    sizes: tuple[int, ...],
    shape: dict[str, int],
    with_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not with_library:
        monkeypatch.setattr("pdserve.engine.runner.library", lambda: Missing(Reason.COMPILER, "for this test"))
    checkpoint = opened(family, **shape)
    weights, pages = checkpoint.weights(), list[torch.Tensor]()
    right = greedy_texts(
        Runner(load_model(checkpoint.config, weights, torch.float32), NUM_PAGES, 16), PROMPTS, NUM_TOKENS, CHUNK
    )
    for size in sizes:
        config = in_parts(checkpoint, worker(checkpoint.path, size)).config
        assert config.num_state_parts == config.num_kv_heads > 1
        with thread_ranks(Degrees(size), config, weights, torch.float32, NUM_PAGES) as ranks:
            assert greedy_texts(ranks, PROMPTS, NUM_TOKENS, CHUNK) == right
            pages.append(by_heads(ranks).clone())
    for others in pages[1:]:
        torch.testing.assert_close(others, pages[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "shape", "size", "reason"),
    [
        ("lfm2", {}, 4, "tensor_parallel_size: 4: 2 KV heads of a model with states are not divided evenly in memory"),
        ("qwen3.5", FOUR_HEADS, 1, "rank_memory: own is not served for a model whose states are not divided evenly by"),
        (
            "falcon-h1",
            {**FOUR_HEADS, "mamba_n_heads": 8, "mamba_d_ssm": 128},
            1,
            "rank_memory: own is not served for a",
        ),
    ],
)
def test_states_without_equal_parts_are_refused_by_name(
    opened: Callable[..., Checkpoint], family: str, shape: dict[str, int], size: int, reason: str
) -> None:
    checkpoint = opened(family, **shape)
    with pytest.raises(ConfigError, match=f"^{reason}"):
        in_parts(checkpoint, worker(checkpoint.path, size))


def test_states_are_whole_where_ranks_share_pages(opened: Callable[..., Checkpoint]) -> None:
    checkpoint = opened("lfm2")
    shared = worker(checkpoint.path, 2).model_copy(update={"rank_memory": "shared"})
    assert in_parts(checkpoint, shared).config.num_state_parts == 1
