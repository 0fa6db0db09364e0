"""Over the operations and kernels of a GPU, ranks that divide a model draw the tokens of one that has all of it."""

from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts, spec
from long_cases import long
from model_zoo import prompt, write_model
from turned_ranks import turned_ranks

from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.runner import Runner
from pdserve.engine.scheduler import Limits
from pdserve.engine.step import Chunk, StepPlan, Targets
from pdserve.model.loading import load_model
from pdserve.model.mlp import CompiledExperts
from pdserve.model.ops import ExpertStack

NUM_PAGES, NUM_TOKENS, CHUNK = 20, 2, 37
LIMITS = Limits(4, 64, 128, frozenset())
PROMPTS = [prompt(count, count) for count in (5, 45)]
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "vocab_size": 511}
SCORED = StepPlan((Chunk(tuple(prompt(9, 1)), 0, (PageId(2),), (spec(),), targets=Targets(prompt(9, 1)[1:], 2)),))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        ("llama3", 2, {**NINE_HEADS, "num_hidden_layers": 1}),  # one KV head, and two
        *long(
            ("qwen3-moe", 2, {}),  # experts are multiplied in groups
            ("llama3", 3, NINE_HEADS),
            ("qwen2", 2, {}),  # biases
            ("qwen2-moe", 2, {}),  # a shared expert with a gate
            ("olmo2", 2, {}),  # norms over the heads of all ranks
            ("mixtral", 2, {}),
            ("phi", 2, {}),
        ),
    ],
)
def test_ranks_over_kernels_draw_the_tokens_of_one_rank_in_torch(
    family: str, size: int, shape: dict[str, int], tmp_path: Path
) -> None:
    checkpoint = open_directory(write_model(family, tmp_path, **{"num_hidden_layers": 2, **shape}))
    config, weights = checkpoint.config, checkpoint.weights()
    plain = Runner(load_model(config, weights, torch.float32), NUM_PAGES, 16)
    expected, (scores,) = greedy_texts(plain, PROMPTS, NUM_TOKENS, CHUNK), plain.run(SCORED).prompts.values()
    with turned_ranks(size, config, weights, NUM_PAGES, LIMITS) as ranks:
        assert greedy_texts(ranks, PROMPTS, NUM_TOKENS, CHUNK) == expected
        (found,) = ranks.run(SCORED).prompts.values()
        assert found.top_ids == scores.top_ids
        torch.testing.assert_close(ranks.page(PageId(2)), plain.kv[2], atol=1e-4, rtol=1e-4)
        assert {runner.kv.shape[3] for runner in ranks.runners} <= {1, 2}, "of its own KV heads alone"
        mlps = [layer.mlp for runner in ranks.runners for layer in runner._model.layers]  # type: ignore[attr-defined]
        stacks = [mlp.experts for mlp in mlps if isinstance(mlp, CompiledExperts)]
        assert all(isinstance(each, ExpertStack) for each in stacks)
        assert bool(stacks) == bool(config.design.mixtures)
