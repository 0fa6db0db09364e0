"""Layers with a state: many tokens at once leave what they leave one by one, and a step that fails leaves nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts, spec
from loaded_models import loaded_model
from model_zoo import STATES, first_disagreement, load_oracle, prompt, write_model
from torch import Tensor
from whole_attention import torch_attention

from pdserve.base.errors import ConfigError
from pdserve.base.ids import PageId
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.runner import Runner
from pdserve.engine.states import States
from pdserve.engine.states_compiled import CompiledStates
from pdserve.engine.step import Chunk, StepPlan, StepResult
from pdserve.executor.failing import Isolating
from pdserve.executor.kernel_checks import check_kernels, check_use
from pdserve.executor.layouts import describe_layout
from pdserve.model.config import ModelConfig
from pdserve.model.delta_rule import BLOCK, DeltaTokens, delta_rule
from pdserve.model.family import Model
from pdserve.model.loading import load_model
from pdserve.model.recurrent import Convolution
from pdserve.settings.config import WorkerConfig

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def one_by_one(parts: list[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the delta rule as it is defined, in float64."""
    q, k, v, beta, decay = (each.double() for each in parts)
    memory, made = memory.double(), []
    for t in range(q.shape[-2]):
        memory = memory * decay[..., t, :, None].exp()
        wrong = v[..., t, :] - torch.einsum("...kv,...k->...v", memory, k[..., t, :])
        memory = memory + torch.einsum("...k,...v->...kv", k[..., t, :], wrong * beta[..., t, :])
        made.append(torch.einsum("...kv,...k->...v", memory, q[..., t, :]))
    return torch.stack(made, -2), memory


@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_delta_rule_of_many_tokens_is_that_of_each_in_turn(length: int, strength: float) -> None:
    heads, shape = (2, 3), (2, 3, length)
    q, k = (torch.nn.functional.normalize(random(*shape, 8, seed=seed), dim=-1) for seed in (1, 2))
    decay = -strength * random(*shape, 1, seed=4).abs()
    parts = [q, k, random(*shape, 5, seed=3), random(*shape, 1, seed=5).sigmoid(), decay]
    memory = random(*heads, 8, 5)
    made, after = delta_rule(DeltaTokens(*parts), memory.clone())
    expected, last = one_by_one(parts, memory)
    torch.testing.assert_close(made.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.double(), last, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 3), (5, 6)])
def test_a_convolution_goes_on_from_its_last_inputs(kernel: int, cuts: tuple[int, ...]) -> None:
    convolution, x = Convolution(random(kernel, 6), random(6)), random(2, 9, 6)
    state, made = torch.zeros(2, (kernel - 1) * 6), []
    for part in x.tensor_split(cuts, 1):
        sums, state = convolution.of(part, state)
        made.append(sums)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (kernel - 1, 0))
    weight = convolution.weight.t()[:, None]
    expected = torch.nn.functional.conv1d(padded, weight, convolution.bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(torch.cat(made, 1), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3.5", tmp_path_factory.mktemp("qwen3.5"))


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return open_directory(folder).config


@pytest.fixture
def model(folder: Path, config: ModelConfig) -> Model:
    return load_model(config, open_directory(folder).weights(), torch.float32)


@pytest.fixture(params=["torch", "compiled"])
def _in_torch_or_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who computes states."""
    if request.param == "torch":
        monkeypatch.setattr("pdserve.engine.runner.states_of", lambda _: States)


@pytest.mark.usefixtures("_in_torch_or_compiled")
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_however_a_prompt_is_cut_its_text_is_that_of_transformers(chunk: int, folder: Path, model: Model) -> None:
    """Prompts that end before, at and behind the ends of spans."""
    span = Runner(model, 1, 16).groups[0].page_size
    lengths = (1, span - 1, span, span + 1) if chunk > 1 else (5, span)
    prompts = [prompt(length) for length in (*lengths, 2 * span + 3)]
    oracle = load_oracle(folder)
    for text, answer in zip(prompts, greedy_texts(Runner(model, 50, 16), prompts, 10, chunk), strict=True):
        assert first_disagreement(oracle, text, answer) is None


@pytest.mark.usefixtures("_in_torch_or_compiled")
def test_a_state_that_is_not_kept_is_noticed(folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for states in (States, CompiledStates):
        monkeypatch.setattr(states, "commit", lambda *_: None)
    (answer,) = greedy_texts(Runner(model, 50, 16), [prompt(40)], 10)
    assert first_disagreement(load_oracle(folder), prompt(40), answer) is not None


@pytest.mark.usefixtures("_in_torch_or_compiled")
def test_a_step_that_fails_and_is_computed_again_in_halves_advances_no_state_twice(model: Model) -> None:
    """Both fail after their layers: once together, and one of them again by itself."""
    prompts, runner, failing = [prompt(length) for length in (30, 31)], Runner(model, 50, 16), True

    def run(plan: StepPlan) -> StepResult:
        if failing and any(len(chunk.token_ids) == 1 and chunk.samples for chunk in plan.chunks) and plan.chunks[1:]:
            runner._sampler.sample, before = _fail, runner._sampler.sample  # type: ignore[method-assign]
            try:
                return runner.run(plan)
            finally:
                runner._sampler.sample = before  # type: ignore[method-assign]
        return runner.run(plan)

    def texts() -> list[list[int]]:
        isolating, pages = Isolating(run), [tuple(map(PageId, range(8 * i, 8 * i + 8))) for i in range(4)]
        answers: list[list[int]] = [[], []]
        for step in range(6):
            chunks = tuple(
                Chunk(
                    answer[-1:] if step else text,
                    len(text) + len(answer) - 1 if step else 0,
                    own,
                    (spec(tuple(answer)),),
                    other_pages=(states,),
                )
                for text, answer, own, states in zip(prompts, answers, pages[:2], pages[2:], strict=True)
            )
            result = isolating.run(StepPlan(chunks))
            for answer, drawn in zip(answers, result.tokens, strict=True):
                answer.append(drawn[0][0].token_id)
        return answers

    with_failures = texts()
    failing = False
    assert texts() == with_failures


def _fail(*_: object) -> None:
    raise RuntimeError("sampling failed")


def test_kernels_of_gpus_refuse_float16_and_states_of_several_shapes_by_name(config: ModelConfig) -> None:
    assert len(check_kernels("interpreter", config, 16, torch.float32)) == 1
    with pytest.raises(ConfigError, match=r"device: interpreter .* dtype must be one of .* beside states"):
        check_kernels("interpreter", config, 16, torch.float16)
    first, *others = config.design.layers
    other = replace(first, attention=replace(first.attention, kernel=3))
    unlike = replace(config, design=replace(config.design, layers=(other, *others)))
    with pytest.raises(ConfigError, match=r"device: interpreter .* layers keep states of 2 shapes"):
        check_kernels("interpreter", unlike, 16, torch.float32)


def test_flashinfer_is_refused_beside_states_by_name(config: ModelConfig) -> None:
    worker = WorkerConfig.model_construct(device="cuda", max_model_len=None, attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="attention_backend: flashinfer is not used: its layers keep a state"):
        check_use(worker, config, [], torch.device("cpu"))


@pytest.mark.parametrize("page_size", [16, 32])
def test_a_page_of_tokens_takes_at_least_the_bytes_of_a_state(config: ModelConfig, page_size: int) -> None:
    layout = describe_layout(config, "weights", page_size, "bfloat16", "cpu")
    layout.check()
    (state,) = layout.others
    assert state.state_elements == 2 * sum(config.state_sizes) <= layout.page_bytes // 2
    assert state.page_size == layout.page_size
    assert layout.page_size % page_size == 0
    assert layout.sent_bytes(100) == 3 * layout.page_bytes if layout.page_size < 100 else 2 * layout.page_bytes


@torch.inference_mode()
@pytest.mark.parametrize("family", STATES)
def test_in_bfloat16_logits_are_as_far_from_those_of_float32_as_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    folder = write_model(family, tmp_path)
    model, oracle = loaded_model(folder, torch.bfloat16), load_oracle(folder)
    text = prompt(150)
    exact = oracle(torch.tensor([text])).logits[0]
    theirs = oracle.bfloat16()(torch.tensor([text])).logits[0].float()
    ours = logits_of(model, text).float()
    of_ours, of_theirs = ((each - exact).square().mean(-1) for each in (ours, theirs))
    if family in ("lfm2-moe", "nemotron-h-moe"):  # of which a few tokens choose other experts
        assert of_ours.median().sqrt() < 1.5 * of_theirs.median().sqrt()
        return
    assert of_ours.mean().sqrt() < 1.5 * of_theirs.mean().sqrt()


def logits_of(model: Model, text: list[int]) -> Tensor:
    runner, pages = Runner(model, 20, 16), tuple(map(PageId, range(20)))
    plan = StepPlan((Chunk(text, 0, pages[:10], (spec(),), other_pages=(pages[10:],)),))
    return model.forward(torch.tensor(text), torch_attention(model, runner.kv, plan, runner.groups), None)
