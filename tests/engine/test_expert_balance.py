"""Ratios are of the tokens since the last ones, of each layer, once there are enough."""

import pytest
import torch
from greedy_runs import spec
from small_shapes import FOUR_HEADS, SMALL

from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.engine.expert_balance import WINDOW, ExpertBalance
from pdserve.engine.runner import Runner, is_compiled
from pdserve.engine.step import Chunk, StepPlan
from pdserve.model.config import ModelConfig
from pdserve.model.loading import dummy_weights, load_model

CONFIG = ModelConfig.from_hf(
    {
        **SMALL,
        **FOUR_HEADS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 300,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
)


def test_the_busiest_expert_is_compared_with_the_mean_of_each_window() -> None:
    counts = [torch.tensor([5, 0, 0, 5]), torch.zeros(3, dtype=torch.int64)]
    balance = ExpertBalance(counts)
    assert balance.after(WINDOW - 1) == ()
    counts[0] += torch.tensor([300, 100, 0, 0])
    counts[1] += torch.tensor([7, 7, 7])
    assert balance.after(1) == (3.0, 1.0)
    assert balance.after(1) == ()
    counts[0] += torch.tensor([0, 0, 40, 40])
    assert balance.after(5 * WINDOW) == (2.0,), "no token has come by the other layer"


@pytest.mark.parametrize("form", ["none", "int8"])
def test_steps_bring_the_ratios_of_what_each_layer_counts(form: ChosenQuantization) -> None:
    """Once by a loop over experts, and once by compiled calls."""
    model = load_model(CONFIG, in_form(dummy_weights(CONFIG), form), torch.float32)
    assert is_compiled(model) == (form == "int8")
    runner, pages = Runner(model, 40, 16, ()), tuple(range(40))
    prompt, ratios = [token % 300 for token in range(600)], list[float]()
    for begin in (0, 0):
        ratios += runner.run(StepPlan((Chunk(prompt, begin, pages, (spec(),)),))).expert_ratios
    assert ratios == [float(each.max()) * 8 / float(each.sum()) for each in model.expert_counts()]
    assert [int(each.sum()) for each in model.expert_counts()] == [2 * 1200, 2 * 2], "the last layer computes one row"


def test_a_model_without_experts_has_no_ratios() -> None:
    assert ExpertBalance([]).after(10 * WINDOW) == ()


def test_one_expert_for_all_is_as_busy_as_there_are_experts() -> None:
    counts = [torch.zeros(64, dtype=torch.int64)]
    balance = ExpertBalance(counts)
    counts[0][9] += WINDOW
    assert balance.after(WINDOW) == pytest.approx((64.0,))
