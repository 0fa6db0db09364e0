"""What the laboratory writes in a format is near what it was given, as pdserve reads it."""

import pytest
import torch
from held_weights import held
from torch import Tensor

from lab.quantizers import FORMS, GPTQ, in_gptq
from pdserve.checkpoint.published import decoding, read_format


def decoded(config: object, parts: dict[str, Tensor]) -> Tensor:
    stored = held({f"x.{name}": value for name, value in parts.items()})
    weights = decoding(stored, read_format({"quantization_config": config} if config else {}))
    return torch.as_tensor(weights["x.weight"].read(())).float()


def drawn() -> tuple[Tensor, Tensor]:
    """Return a matrix, and inputs of unlike sizes that resemble each other."""
    draw = torch.Generator().manual_seed(1)
    sizes = torch.exp(torch.randn(192, generator=draw))
    rows = torch.randn(512, 192, generator=draw) + torch.randn(512, 1, generator=draw)
    return torch.randn(160, 192, generator=draw) * 0.05, rows * sizes


@pytest.mark.parametrize("form", FORMS)
def test_a_form_stands_for_nearly_what_was_rounded(form: str) -> None:
    config, code = FORMS[form]
    matrix, _ = drawn()
    found = decoded(config, code(matrix))
    assert found.shape == matrix.shape
    share = float((found - matrix).norm() / matrix.norm())
    assert share < (0.12 if "4" in form or "AWQ" in form else 0.03)


@pytest.mark.parametrize("by_activation", [False, True])
def test_gptq_loses_less_of_products_than_rounding_to_the_nearest(*, by_activation: bool) -> None:
    matrix, rows = drawn()
    given = in_gptq({"x": rows.t() @ rows / len(rows)}, "x", matrix, by_activation=by_activation)
    in_order = bool((given["g_idx"] == torch.arange(192) // 64).all())
    assert in_order != by_activation
    config, nearest = FORMS["AWQ's packing"]
    lost = [
        float((rows @ (each - matrix).t()).norm())
        for each in (decoded(GPTQ | {"desc_act": by_activation}, given), decoded(config, nearest(matrix)))
    ]
    assert lost[0] < 0.8 * lost[1]
