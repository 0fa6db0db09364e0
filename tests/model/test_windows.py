"""Models whose layers have windows or states in part: pages leave a window while a sequence runs, and states go on in
other pages, and no token changes by it.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loaded_models import loaded_model
from long_cases import long, long_but
from model_zoo import STATES, VOCAB, first_disagreement, load_oracle, prompt, write_model
from spoilt_pages import CHUNK, Engine
from transformers import PreTrainedModel

from pdserve.base.errors import ConfigError
from pdserve.engine.layer_kinds import pages_of, paging_of, pool_size
from pdserve.engine.runner import Runner
from pdserve.executor.form import KERNEL_DEVICES
from pdserve.executor.layouts import describe_layout
from pdserve.executor.rank_memory import own_layout
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.layer_groups import held_by, layer_groups
from pdserve.model.weights import Rank
from pdserve.protocol.paging import CHUNKS_AT_ONCE
from pdserve.settings.config import Device
from pdserve.settings.degrees import Degrees

pytestmark = pytest.mark.slow

WINDOW = 96
AHEAD = 4  # pages that a sequence may hold for tokens to come
WITH_WINDOWS = (
    *("cohere2", "exaone4", "gemma2", "gemma3", "gemma4", "gemma4-moe", "gpt-oss", "llama4", "ministral", "olmo3"),
    "gemma4-shared",
    *STATES,
)
ALWAYS = ("gemma2", "gemma3", "gemma4", "gemma4-shared", "lfm2", "qwen3.5")
BASE = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    return write_model(family, tmp_path)


def loaded(folder: Path) -> tuple[Model, PreTrainedModel]:
    return loaded_model(folder), load_oracle(folder)


of_families = pytest.mark.parametrize("family", long_but(ALWAYS, WITH_WINDOWS))


@of_families
@pytest.mark.parametrize("page_size", [16, *long(32)])
def test_tokens_are_those_of_transformers_however_few_pages_there_are(folder: Path, page_size: int) -> None:
    """Pages that have left windows are written over; sequences are preempted; prefixes are found again."""
    model, oracle = loaded(folder)
    shared = prompt(170)
    prompts = [prompt(300), [*shared, *prompt(30, 1)], prompt(7), prompt(WINDOW - 1), prompt(WINDOW + 1)]
    paging = paging_of(layer_groups(model.config, page_size))
    engine = Engine(Runner(model, paging.num_pages(460) + 4, page_size))
    engine.generate(prompts, 60)
    again = engine.generate([[*shared, *prompt(30, 2)], prompts[1]], 60)
    assert again[1].num_cached_tokens > 0 or page_size > 16, "of larger pages, there are too few to keep it"
    for number, token_ids in enumerate([*prompts, [*shared, *prompt(30, 2)], prompts[1]]):
        assert len(engine.tokens[number]) == 60
        assert first_disagreement(oracle, token_ids, engine.tokens[number]) is None


@pytest.mark.parametrize("family", [*long("gemma2"), "gemma3"])
def test_a_prompt_fits_that_would_not_with_all_pages_of_its_windows(folder: Path) -> None:
    """Its pages leave the window between chunks; it is preempted in its middle, and found in the cache afterwards."""
    model, oracle = loaded(folder)
    text = prompt(900)
    paging = paging_of(layer_groups(model.config, 16))
    engine = Engine(Runner(model, paging.most_pages(960, CHUNK) + paging.num_pages(60), 16))
    assert engine.num_pages < paging.num_pages(900)
    engine.generate([text], 12)
    assert engine.scheduler.num_preemptions == 0
    both = [prompt(60, 1), text[::-1]]  # the first one is more urgent, and grows
    engine.generate(both, 30)
    assert engine.scheduler.num_preemptions == 1
    (again,) = engine.generate([both[1]], 12)
    assert again.num_cached_tokens > 800
    for number, token_ids in enumerate([text, *both, both[1]]):
        assert first_disagreement(oracle, token_ids, engine.tokens[number]) is None


@pytest.mark.parametrize("family", ["gemma3"])
def test_a_long_sequence_holds_what_its_windows_and_its_full_layers_need(folder: Path) -> None:
    model, _ = loaded(folder)
    engine = Engine(Runner(model, 400, 16))
    engine.generate([prompt(600)], 100)
    full, window = engine.runner.groups
    assert (len(full.layers), len(window.layers), full.page_size, window.page_size) == (1, 5, 80, 16)
    chunks = WINDOW + full.page_size + CHUNKS_AT_ONCE * CHUNK
    assert max(engine.held) == engine.held[0] == -(-600 // 80) + -(-chunks // 16) + 1
    assert engine.held[-1] <= -(-700 // 80) + -(-WINDOW // 16) + AHEAD


@pytest.mark.parametrize(
    ("layers", "window", "sizes"),
    [
        (6, WINDOW, (80, 16)),
        (7, WINDOW, (96, 16)),
        (5, WINDOW, (16,)),  # all layers slide
        (2, None, (16,)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pages_of_all_groups_fill_nearly_the_same_bytes(
    layers: int, window: int | None, sizes: tuple[int, ...], device: Device
) -> None:
    kinds = ["full_attention"] * layers if window is None else None
    config = ModelConfig.from_hf(BASE | {"num_hidden_layers": layers, "sliding_window": WINDOW, "layer_types": kinds})
    layout, has_kernels = describe_layout(config, "weights", 16, "float32", device), device in KERNEL_DEVICES
    layout.check()
    found = layout.paging.sizes
    assert found == sizes or (
        has_kernels and all(size & (size - 1) == 0 for size in found) and len(found) == len(sizes)
    )
    groups = layer_groups(config, 16, powers_of_two=has_kernels)
    assert sorted(place for group in groups for place in group.layers) == list(range(layers))
    assert math.prod(pool_size(config, 1, groups, config.head_dim)) * 4 == layout.page_bytes


def with_kinds(num_full: int, num_windows: int, num_head_layers: int = 0) -> ModelConfig:
    kinds = ["full_attention"] * num_full + ["sliding_attention"] * num_windows
    own = {"num_hidden_layers": len(kinds), "sliding_window": WINDOW, "layer_types": kinds}
    return replace(ModelConfig.from_hf(BASE | own), num_head_layers=num_head_layers)


@pytest.mark.parametrize("num_windows", [4, 5, 3, 9])  # pages of both groups are full, or those of one have room
def test_a_rank_with_memory_of_its_own_has_its_heads_of_all_groups_at_one_place_in_the_page(num_windows: int) -> None:
    config = with_kinds(2, num_windows)
    groups, width = layer_groups(config, 16), config.head_dim
    whole, held = (held_by(rank, config, groups) for rank in (Rank(), Rank(1, 2)))
    size = pool_size(config, 3, whole, width)
    pool = torch.arange(math.prod(size)).view(size)
    part = pool.view(3, config.num_kv_heads, -1)[:, 1].contiguous()
    assert tuple(part.shape) == pool_size(config, 3, held, width)
    layout = own_layout(config, describe_layout(config, "weights", 16, "float32", "cpu"), Degrees(2))
    assert part[0].numel() * 4 * 2 == layout.page_bytes
    for of_whole, of_rank in zip(whole, held, strict=True):
        of_all, own = (pages_of(kv, config, of, width) for kv, of in ((pool, of_whole), (part, of_rank)))
        assert own.shape == (3, len(of_rank.layers), 2, 1, of_rank.page_size, width)
        assert torch.equal(of_all[:, :, :, 1:], own)


@pytest.mark.parametrize("num_head_layers", [0, 1])
@pytest.mark.parametrize("num_full", range(1, 7))
def test_no_number_of_layers_leaves_pages_that_a_router_refuses(num_full: int, num_head_layers: int) -> None:
    for num_windows in range(1, 30):
        describe_layout(with_kinds(num_full, num_windows, num_head_layers), "weights", 16, "float32", "cpu").check()


def test_pages_that_a_router_would_refuse_are_refused_at_the_start() -> None:
    """Pages of 21 windows do not end with a slot of the full layers' pages of 128 tokens, and are rounded up."""
    with pytest.raises(ConfigError, match="page_size: 128 tokens of the full layers fill 32768 of 49152 bytes"):
        describe_layout(with_kinds(1, 21), "weights", 16, "float32", "cuda")


def test_layers_whose_pages_would_be_half_empty_keep_their_tokens() -> None:
    assert [group.window for group in layer_groups(with_kinds(4, 1), 16)] == [None]
