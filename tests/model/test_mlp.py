"""An MLP is a value: one of another kind needs no change in the layer, the runner, or what counts bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from greedy_runs import greedy_texts
from held_weights import scaled
from small_models import small_config
from torch import Tensor

from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.engine.runner import Runner, is_compiled
from pdserve.kernels.cpu.build import Missing
from pdserve.kernels.cpu.layers import Tiles
from pdserve.kernels.cpu.library import library
from pdserve.model import ops_cpu
from pdserve.model.decoder import Decoder
from pdserve.model.design import GatedMlp as GatedDesign
from pdserve.model.family import Tensors
from pdserve.model.loading import dummy_weights, load_model, ops_for
from pdserve.model.mlp import GatedMlp, Mlp
from pdserve.model.onednn import packs
from pdserve.model.ops import Dense, GateUp, Linear, Ops, Packed, weight_bytes
from pdserve.model.ops_cpu import CpuOps
from pdserve.model.weights import Rank

CONFIG = small_config(300, intermediate_size=128)
PROMPTS = [[1, 2, 3], list(range(40)), [7]]


@dataclass(frozen=True, slots=True)
class Parted:
    """Adds what its parts make of a token, as a mixture does whose experts are all chosen."""

    parts: tuple[Mlp, ...]

    def forward(self, ops: Ops, x: Tensor, residual: Tensor | None, scale: float = 1.0) -> Tensor:
        for part in self.parts:
            residual = part.forward(ops, x, residual, scale)
        assert residual is not None
        return residual

    def matrices(self) -> Iterator[Linear | GateUp]:
        for part in self.parts:
            yield from part.matrices()

    def bytes_read(self, num_rows: int) -> int:
        return sum(part.bytes_read(num_rows) for part in self.parts[:num_rows])


def models(form: ChosenQuantization) -> tuple[Decoder, Decoder]:
    """Return a model, and one that computes the same with parts of its MLPs."""
    weights = in_form(scaled(dummy_weights(CONFIG)), form)
    dense, ops = load_model(CONFIG, weights, torch.float32), ops_for(torch.device("cpu"), 16)
    assert isinstance(dense, Decoder)

    def parted(layer: int) -> Mlp:
        tensors = [Tensors(weights, torch.float32, dense.device) for _ in range(2)]
        ranks = enumerate(tensors)
        prefix = f"model.layers.{layer}.mlp."
        of = CONFIG.design.layers[layer].mlp
        assert isinstance(of, GatedDesign)
        return Parted(tuple(GatedMlp.build(prefix, of, 64, each, ops, Rank(index, 2)) for index, each in ranks))

    layers = tuple(replace(layer, mlp=parted(index)) for index, layer in enumerate(dense.layers))
    return dense, replace(dense, layers=layers)


@pytest.mark.parametrize("form", ["none", "int8"])
def test_a_model_computes_with_another_kind_of_mlp(form: ChosenQuantization) -> None:
    dense, parted = models(form)
    assert is_compiled(parted) == is_compiled(dense), "decode programs record it like any other"
    expected = greedy_texts(Runner(dense, 50, 16, ()), PROMPTS, 16)
    assert greedy_texts(Runner(parted, 50, 16, ()), PROMPTS, 16) == expected
    assert len({token for text in expected for token in text}) > 3


def test_a_step_reads_all_matrices_and_one_row_of_the_embedding_a_token() -> None:
    dense, parted = models("none")
    each = sum(map(weight_bytes, dense.matrices())) - weight_bytes(dense.embedding)
    assert dense.bytes_read(3) == each + 3 * CONFIG.hidden_size * 4
    mlps = sum(map(weight_bytes, (matrix for layer in dense.layers for matrix in layer.mlp.matrices())))
    assert parted.bytes_read(1) == dense.bytes_read(1) - mlps // 2, "a row wakes one part"
    assert parted.bytes_read(2) == dense.bytes_read(2)


def test_activations_are_those_of_the_layers_widest_step() -> None:
    dense, _ = models("none")
    heads = (2 * CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim
    assert dense.activation_bytes() == 4 * (4 * CONFIG.hidden_size + heads + 3 * 128)


@pytest.mark.parametrize(("in_library", "kind"), [(True, Tiles), (False, Packed)])
def test_a_matrix_unit_that_the_library_cannot_use_is_left_to_onednn(
    in_library: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, loaded = Dense(torch.zeros(64, 64, dtype=torch.bfloat16)), library()
    if isinstance(loaded, Missing) or not packs(matrix.data):
        pytest.skip("nothing to choose from")
    monkeypatch.setattr(ops_cpu, "has_matrix_unit", lambda _: in_library)
    monkeypatch.setattr(ops_cpu, "_has_matrix_units", lambda: True)
    assert isinstance(CpuOps(loaded).held(matrix), kind)
