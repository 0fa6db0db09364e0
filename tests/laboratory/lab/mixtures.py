"""What steps of a mixture of experts take on a CPU, beside a dense model of the active size, in turn in one process.

All are random models. The loop is the same mixture, computed one expert after the other in Python.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import process_time

import torch

from lab.decoding import step_of
from pdserve.base.values import value
from pdserve.checkpoint.checkpoint import ChosenQuantization, in_form
from pdserve.engine.runner import Runner
from pdserve.kernels.cpu.experts import TiledExperts
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.design import Activation
from pdserve.model.loading import dummy_weights, load_model
from pdserve.model.mlp import CompiledExperts, Experts, GatedMlp, Mlp
from pdserve.model.ops import Dense, GateUp, Linear

HIDDEN, INNER, COUNT, CHOSEN, VOCAB = 1024, 512, 64, 8, 8192
_ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
_CONTEXT, _PAGE_SIZE = 256, 16  # tokens
_WARM_UP = 2  # rounds


@value
class StepTimes:
    """Milliseconds of processor time of a step of each model, and the medians of the rounds' ratios."""

    step: str
    mixture_ms: float
    dense_ms: float
    loop_ms: float
    mixture_to_dense: float
    mixture_to_loop: float
    bytes_to_dense: float  # of weights that the step is expected to read
    experts: float  # that a layer of the mixture reads, on average


def measure_mixtures(
    form: ChosenQuantization, num_layers: int, steps: tuple[tuple[int, int], ...], rounds: int
) -> Iterator[StepTimes]:
    """Measure steps of so many sequences and so many tokens of each."""
    mixture, dense = (_model(num_layers, form, is_mixture=each) for each in (True, False))
    models = (
        mixture,
        dense,
        replace(
            mixture, layers=tuple(replace(each, mlp=_loop(each.mlp)) for each in mixture.layers if each.mlp is not None)
        ),
    )
    pages = max(count * _CONTEXT + count * length for count, length in steps) // _PAGE_SIZE + 1
    runners = [Runner(each, pages, _PAGE_SIZE, ()) for each in models]
    for step in steps:
        yield _measured(models, runners, step, rounds)


def _model(num_layers: int, form: ChosenQuantization, *, is_mixture: bool) -> Decoder:
    sizes: dict[str, object] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCAB,
        **_ATTENTION,
    }
    if is_mixture:
        own = {
            "num_experts": COUNT,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": INNER,
            "norm_topk_prob": True,
        }
        sizes |= {"architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": CHOSEN * INNER, **own}
    else:
        sizes |= {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": CHOSEN * INNER}
    config = ModelConfig.from_hf({**sizes, "eos_token_id": 1})
    model = load_model(config, in_form(dummy_weights(config), form), torch.bfloat16)
    assert isinstance(model, Decoder)
    return model


@dataclass(frozen=True, slots=True)
class _Loop(Experts):
    """A mixture that no program can record."""

    def matrices(self) -> Iterator[Linear | GateUp]:
        yield self.router


def _loop(of: Mlp) -> Mlp:
    """Return the same mixture as a loop over experts, over the same memory."""
    if not isinstance(of, CompiledExperts) or not isinstance(of.experts, TiledExperts):
        return of
    tiled, router = of.experts, of.experts.router
    mlps = [
        GatedMlp(tiled.gate_up.of_expert(i), Activation.SILU, tiled.down.of_expert(i))
        for i in range(len(router.weight))
    ]
    return _Loop(
        Dense(router.weight),
        router.ranks_bias,
        router.routing,
        tuple(mlps),
        of.shared,
        torch.zeros_like(tiled.counts),
        tiled.gate_up.inputs,
    )


def _measured(models: tuple[Decoder, ...], runners: list[Runner], step: tuple[int, int], rounds: int) -> StepTimes:
    count, length = step
    plan, taken = step_of(count, _CONTEXT if length == 1 else length, length), list[list[float]]()
    counts = models[0].expert_counts()
    for turn in range(_WARM_UP + rounds):
        for each in counts:
            each.zero_()
        ms = [0.0] * len(runners)
        for place in range(len(runners)):
            at = (place + turn) % len(runners)
            begun_s = process_time()
            runners[at].run(plan)
            ms[at] = 1e3 * (process_time() - begun_s)
        taken.append(ms)
    del taken[:_WARM_UP]
    touched = [float((each > 0).sum()) for each in counts]
    mixture, dense = (each.bytes_read(count * length) for each in models[:2])
    mixture_ms, dense_ms, loop_ms = (median(column) for column in zip(*taken, strict=True))
    return StepTimes(
        step=f"{count} x {length}",
        mixture_ms=mixture_ms,
        dense_ms=dense_ms,
        loop_ms=loop_ms,
        mixture_to_dense=median(each[0] / each[1] for each in taken),
        mixture_to_loop=median(each[0] / each[2] for each in taken),
        bytes_to_dense=mixture / dense,
        experts=sum(touched) / max(len(touched), 1),
    )
