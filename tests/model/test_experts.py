"""How tokens choose experts, and what a mixture makes of them, against a loop over tokens in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.library import library
from pdserve.kernels.routing import Routing
from pdserve.model import mlp
from pdserve.model.design import Activation, Experts, GatedMlp
from pdserve.model.family import Tensors
from pdserve.model.ops import TorchOps, weight_bytes
from pdserve.model.ops_cpu import CpuOps
from pdserve.model.routing import route, routed
from pdserve.model.weights import WHOLE, Stored

HIDDEN, INNER = 8, 6


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int]:
    """Draw how tokens choose, and among how many experts."""
    num_groups, a_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kept = draw(st.integers(1, num_groups))
    routing = Routing(
        draw(st.integers(1, kept * a_group)),
        by_sigmoid=draw(st.booleans()),
        bias=draw(st.none() | st.just("gate.bias")),
        groups=(num_groups, kept),
        normalized=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return routing, num_groups * a_group


def chosen_by_hand(logits: list[float], bias: list[float], routing: Routing) -> dict[int, float]:
    """Return the experts of one token and their weights."""
    if routing.by_sigmoid:
        scores = [1 / (1 + math.exp(-each)) for each in logits]
    else:
        scores = [math.exp(each) for each in logits]
        scores = [each / sum(scores) for each in scores]
    ranks = [score + more for score, more in zip(scores, bias, strict=True)]
    num_groups, kept = routing.groups
    size = len(ranks) // num_groups
    groups = [range(first, first + size) for first in range(0, len(ranks), size)]
    best = sorted(groups, key=lambda group: -sum(sorted(ranks[expert] for expert in group)[-2:]))[:kept]
    allowed = sorted(expert for group in best for expert in group)
    chosen = sorted(allowed, key=lambda expert: -ranks[expert])[: routing.num_chosen]
    total = sum(scores[expert] for expert in chosen) if routing.normalized else 1.0
    return {expert: routing.scale * scores[expert] / total for expert in chosen}


@given(routings(), st.integers(0, 5), st.integers(0, 2**16))
def test_each_token_chooses_as_by_hand(drawn: tuple[Routing, int], num_tokens: int, seed: int) -> None:
    routing, count = drawn
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, count, generator=generator)
    bias = torch.randn(count, generator=generator) * 0.3 if routing.bias else None
    weights, chosen = routed(logits, bias, routing)
    assert weights.shape == chosen.shape == (num_tokens, routing.num_chosen)
    added = [0.0] * count if bias is None else bias.tolist()
    for row in range(num_tokens):
        expected = chosen_by_hand(logits[row].tolist(), added, routing)
        found = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-4)


def test_of_equal_scores_the_first_are_chosen() -> None:
    _, chosen = routed(torch.zeros(2, 40), None, Routing(3))
    assert chosen.tolist() == [[0, 1, 2]] * 2


def weights_of(of: Experts) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    names = {"gate.weight": random(of.num_experts, HIDDEN)}
    for expert in range(of.num_experts):
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            names[f"experts.{expert}.{name}_proj.weight"] = random(*shape)
    return names


def built(of: Experts) -> tuple[mlp.Experts, dict[str, Tensor]]:
    values = weights_of(of)
    found = mlp.Experts.build("", of, HIDDEN, tensors_of(values, torch.float32), TorchOps(), WHOLE)
    assert isinstance(found, mlp.Experts)
    return found, values


def tensors_of(values: dict[str, Tensor], dtype: torch.dtype) -> Tensors:
    stored = {name: Stored(tuple(value.shape), lambda part, value=value: value[part]) for name, value in values.items()}
    return Tensors(stored, dtype, torch.device("cpu"))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
@pytest.mark.parametrize(("count", "num_chosen"), [(1, 1), (5, 1), (5, 2), (5, 5), (64, 8)])
def test_a_mixture_is_the_sum_of_what_the_chosen_make(num_tokens: int, count: int, num_chosen: int) -> None:
    of = Experts(count, GatedMlp(INNER, Activation.SILU), Routing(num_chosen))
    mixture, values = built(of)
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(5))
    weights, chosen = routed(x @ values["gate.weight"].T, None, of.routing)
    expected = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for row in range(num_tokens):
        for weight, expert in zip(weights[row].tolist(), chosen[row].tolist(), strict=True):
            gate, up, down = (
                values[f"experts.{expert}.{name}_proj.weight"].double() for name in ("gate", "up", "down")
            )
            expected[row] += weight * (silu(x[row].double() @ gate.T) * (x[row].double() @ up.T)) @ down.T
    found = mixture.forward(TorchOps(), x, None)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    residual = torch.ones_like(x)
    torch.testing.assert_close(mixture.forward(TorchOps(), x, residual, 0.5), 1.0 + 0.5 * found)


def test_only_the_experts_that_are_chosen_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Experts(6, GatedMlp(INNER), Routing(2))
    mixture, _ = built(of)
    read, forward = list[int](), mlp.GatedMlp.forward

    def noted(self: mlp.GatedMlp, ops: TorchOps, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        read.append(next(place for place, expert in enumerate(mixture.experts) if expert is self))
        return forward(self, ops, x, residual, scale)

    monkeypatch.setattr(mlp.GatedMlp, "forward", noted)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    _, chosen = route(x, mixture.router, None, of.routing)
    mixture.forward(TorchOps(), x, None)
    assert read == sorted(chosen[0].tolist())


def test_in_tiles_a_mixture_reads_and_multiplies_the_matrices_of_the_same_experts() -> None:
    loaded = library()
    assert not isinstance(loaded, Missing)
    of = Experts(8, GatedMlp(INNER), Routing(2))
    ops = CpuOps(loaded)
    mixture = mlp.Experts.build("", of, HIDDEN, tensors_of(weights_of(of), torch.bfloat16), ops, WHOLE)
    if not isinstance(mixture, mlp.CompiledExperts):
        pytest.skip("this processor has no products of bfloat16")
    router, every = 8 * HIDDEN * 2, sum(map(weight_bytes, mixture.matrices()))
    assert mixture.bytes_read(1) == every // 4 + router
    assert mixture.bytes_read(10_000) == every + router
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(6)).bfloat16()
    plain = mlp.Experts.build("", of, HIDDEN, tensors_of(weights_of(of), torch.float32), TorchOps(), WHOLE)
    found, expected = mixture.forward(ops, x, None), plain.forward(TorchOps(), x.float(), None)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert torch.equal(mixture.experts.counts, plain.counts)


def test_bytes_read_are_those_of_the_experts_that_so_many_tokens_are_expected_to_choose() -> None:
    mixture, _ = built(Experts(8, GatedMlp(INNER), Routing(2)))
    one = mixture.experts[0].bytes_read(1)
    router = 8 * HIDDEN * 4
    assert mixture.bytes_read(1) == 2 * one + router
    assert mixture.bytes_read(2) == int(8 * (1 - 0.75**2) * one) + router
    assert mixture.bytes_read(10_000) == 8 * one + router
