"""The engine's tokens and logits beside others': the CPU engine's, float64's, and its own scheduled otherwise.

Small random models in float32 must draw the CPU engine's tokens: prompts in chunks, decode steps replayed, greedy and
sampled sequences side by side. A few layers of an 8B model in bfloat16 may differ from float64 as plain torch does.
"""

import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import gpu_heads
import reference_kernels as reference
import torch
from gpu_device import Device
from gpu_models import (
    DRY_PAGE_SIZE,
    PAGE_SIZE,
    QWEN3_8B,
    AnyRunner,
    Driven,
    Engine,
    OneByOne,
    config_of,
    drive,
    limits_of,
    random_prompt,
    random_weights,
    replay_nothing,
    sequence_of,
)
from gpu_report import Case, Row
from held_weights import held, scaled
from small_shapes import DELTA_NET, FOUR_HEADS, LATENTS, MISTRAL, QWEN_3, SMALL
from torch import Tensor

from pdserve.base.ids import PageId
from pdserve.engine.attention_triton import graph_sizes
from pdserve.engine.drafting import Drafter, ModelDrafter, limits_of_passes
from pdserve.engine.guesses import DraftsBy, NgramLookup
from pdserve.engine.kvcache import KvCache
from pdserve.engine.layer_kinds import paging_of
from pdserve.engine.runner import Runner
from pdserve.engine.runner_cuda import CudaRunner
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Chunk, SampleSpec, StepPlan, Targets
from pdserve.model.config import ModelConfig
from pdserve.model.design import SelfAttention
from pdserve.model.family import Model
from pdserve.model.loading import dummy_weights, load_model
from pdserve.model.weights import Weights
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.sampling import SampledToken, SamplingParams

VOCAB = 300
CHECK_PAGE_SIZE, CHECK_PAGES = 16, 80
PROMPT_LENS = (1, 15, 16, 17, 40, 70, 100)
NUM_TOKENS = 32
DRY_LENS, DRY_TOKENS = (15, 17, 3), 2
CHECK_EOS = 5
CHECK_LIMITS = Limits(6, 80, max_model_len=256, eos_token_ids=frozenset({CHECK_EOS}), num_speculative_tokens=3)
GUESSING = replace(CHECK_LIMITS, guesser=NgramLookup(1, 4))
DRAFTING = replace(CHECK_LIMITS, guesser=DraftsBy(DraftSource.DRAFT_MODEL, CHECK_LIMITS.max_model_len))
DRAFTING_FAMILY = "qwen3 4/2"  # right about itself, and nearly always wrong about others
WEIGHT_SCALE = 4.0  # lets random models write more than one token over and over
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias=((7, 3.0),)),
)
SHAPE: Mapping[str, object] = {**SMALL, "vocab_size": VOCAB, "eos_token_id": CHECK_EOS}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "qwen3 4/2": QWEN_3,
    "llama 9/3": {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "num_key_value_heads": 3},
    "mistral 4/4, window 24": MISTRAL,
    "gemma3, pages of windows": {
        "architectures": ["Gemma3ForCausalLM"],
        **FOUR_HEADS,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
    },
    "deepseek-v3, 16 heads": LATENTS,
    "qwen3.5, delta nets": {**DELTA_NET, "linear_value_head_dim": 24},
    "falcon-h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        **FOUR_HEADS,
        "layer_types": ["conv", "full_attention"],
        "head_dim": 16,
    },
}
FEW_LAYERS = 4
SCORED_TOKENS = 700
WORSE_THAN_TORCH = 1.5  # bfloat16 products are summed in another order than torch's


def cases(device: Device) -> Iterator[Case]:
    """Check tokens first, then logits, then what graphs replay."""
    for family in device.sized(tuple(FAMILIES), tuple(FAMILIES)[:1]):
        yield f"engine {family}", partial(_texts_agree, device, family)
    yield from gpu_heads.cases(device, partial(small_model, DRAFTING_FAMILY))
    config = config_of(device, QWEN3_8B, FEW_LAYERS)
    weights = {name: cast("Tensor", stored.read(())) for name, stored in random_weights(config, device).items()}
    model = load_model(config, held(weights), device.half, device=device.torch)
    yield "bf16 logits against float64", lambda: [_logits_agree(device, model, weights)]
    weights.clear()
    yield "graph equals eager", lambda: _graphs_agree(device, model)


def _texts_agree(device: Device, family: str) -> Iterator[Row]:
    lens, num_tokens = device.sized((PROMPT_LENS, NUM_TOKENS), (DRY_LENS, DRY_TOKENS))
    found = Texts.of(family, device.torch, lens, num_tokens)
    agree = f"{len(lens)} sequences of {num_tokens} tokens agree"
    compared = {
        "the CPU's tokens": found.unlike_the_cpus,
        "asynchronous, one by one": found.unlike_ahead,
        **{f"guesses of {source}, {saved} steps saved": unlike for source, (unlike, saved) in found.guessed.items()},
    }
    for name, wrong in compared.items():
        yield Row(f"{family}: {name}", note=f"sequences {wrong} differ" if wrong else agree, failed=bool(wrong))


@dataclass(frozen=True, slots=True)
class Texts:
    """Which sequences get other tokens from the engine over the kernels than from elsewhere."""

    unlike_the_cpus: list[int]  # from the engine in plain torch
    unlike_ahead: list[int]  # from itself with one step at a time
    guessed: Mapping[str, tuple[list[int], int]]  # from itself with guesses, by their source; and the steps they save

    @classmethod
    def of(cls, family: str, device: torch.device, prompt_lens: Seq[int], num_tokens: int) -> "Texts":
        kernels = small_runner(family, device)
        if device.type == "cuda":
            kernels.capture()
        plain = Runner(small_model(family, torch.device("cpu")), CHECK_PAGES, CHECK_PAGE_SIZE)

        def driven(
            runner: CudaRunner | Runner, depth: int, limits: Limits = CHECK_LIMITS, drafter: Drafter | None = None
        ) -> Driven:
            scheduler = Scheduler(KvCache(CHECK_PAGES, paging_of(runner.groups), None), limits)
            is_launching = isinstance(runner, CudaRunner) and limits is CHECK_LIMITS
            each: AnyRunner = runner if is_launching else OneByOne(runner, drafter)  # type: ignore[assignment]
            return drive(each, scheduler, mixed_sequences(prompt_lens, num_tokens), depth)

        ahead, one_by_one, theirs = driven(kernels, 2), driven(kernels, 1), driven(plain, 1)
        draft, page_size = small_model(DRAFTING_FAMILY, device), kernels.groups[0].page_size
        passes = CudaRunner(draft, CHECK_PAGES, page_size, limits_of_passes(DRAFTING))
        guessed = {
            "lookup": driven(kernels, 1, GUESSING),
            "a draft model": driven(kernels, 1, DRAFTING, ModelDrafter(passes)),
        }

        def unlike(others: Driven) -> list[int]:
            return [order for order in range(len(prompt_lens)) if ahead.texts[order] != others.texts[order]]

        by_source = {source: (unlike(of), one_by_one.num_steps - of.num_steps) for source, of in guessed.items()}
        return cls(unlike(theirs), unlike(one_by_one), by_source)


def small_runner(family: str, device: torch.device) -> CudaRunner:
    return CudaRunner(small_model(family, device), CHECK_PAGES, CHECK_PAGE_SIZE, CHECK_LIMITS)


def small_config(family: str) -> ModelConfig:
    return ModelConfig.from_hf({**SHAPE, **FAMILIES[family]})


def small_weights(config: ModelConfig) -> Weights:
    return scaled(dummy_weights(config), WEIGHT_SCALE)


def small_model(family: str, device: torch.device) -> Model:
    config = small_config(family)
    return load_model(config, small_weights(config), torch.float32, device=device)


def mixed_sequences(prompt_lens: Seq[int], num_tokens: int) -> Iterator[Sequence]:
    rng = random.Random(0)
    for order, length in enumerate(prompt_lens):
        params = replace(PARAMS[order % len(PARAMS)], max_tokens=num_tokens, ignore_eos=True)
        yield sequence_of(order, tuple(rng.randrange(VOCAB) for _ in range(length)), params)


# ---- logits


def _logits_agree(device: Device, model: Model, weights: Mapping[str, Tensor]) -> Row:
    """Score a prompt's tokens, in chunks and by single steps at its end; compare their log probabilities."""
    length = device.sized(SCORED_TOKENS, 12)
    prompt = random_prompt(length, model.config.vocab_size, seed=1)
    targets = torch.tensor(prompt[1:], device=device.torch)

    def scores(logits: Tensor) -> Tensor:
        return logits[:-1].double().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu()

    exact = scores(reference_logits(model.config, weights, prompt, torch.float64))
    torchs = scores(reference_logits(model.config, weights, prompt, device.half))
    ours = _scores_of_engine(device, model, prompt)
    error, allowed = (float((each - exact).abs().max()) for each in (ours, torchs))
    mean, mean_allowed = (float((each - exact).abs().mean()) for each in (ours, torchs))
    figures = {"nats at most": error, "nats of torch": allowed, "nats on average": mean, "of torch's": mean_allowed}
    note = f"{model.config.num_layers} layers, {length} tokens"
    is_near = mean <= WORSE_THAN_TORCH * mean_allowed + 1e-3 and error <= 2 * WORSE_THAN_TORCH * allowed + 1e-2
    return Row("bf16 log probabilities against float64", figures, note, failed=not is_near)


def _scores_of_engine(device: Device, model: Model, prompt: Seq[int]) -> Tensor:
    """Return the log probability that the engine gives each token of a prompt after the first."""
    length, page_size = len(prompt), device.sized(PAGE_SIZE, DRY_PAGE_SIZE)
    runner = CudaRunner(model, -(-length // page_size) + 1, page_size, limits_of(1, length, length + 1))
    starts = [*range(0, length - 4, length // 2), *range(length - 4, length)]  # chunks, then single tokens
    found: list[float] = []
    for start, stop in zip(starts, [*starts[1:], length], strict=True):
        pages = tuple(PageId(1 + page) for page in range(-(-stop // page_size)))
        wanted = prompt[start + 1 : stop + 1]
        scored = Targets(tuple(wanted), 1) if wanted else None
        result = runner.run(StepPlan((Chunk(tuple(prompt[start:stop]), start, pages, (), targets=scored),)))
        if wanted:
            found += torch.frombuffer(bytearray(result.prompts[0].chosen), dtype=torch.float32).tolist()
    return torch.tensor(found, dtype=torch.float64)


@torch.inference_mode()
def reference_logits(
    config: ModelConfig, weights: Mapping[str, Tensor], prompt: Seq[int], dtype: torch.dtype
) -> Tensor:
    """Compute a Llama or Qwen3 model's logits of a whole prompt in plain torch: [num_tokens, vocab_size]."""
    eps, heads = config.design.head.norm.eps, (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    device = weights["model.norm.weight"].device

    def weight(name: str) -> Tensor:
        return weights[f"{name}.weight"].to(dtype)

    attention = config.design.layers[0].attention
    assert isinstance(attention, SelfAttention)
    exponents = torch.arange(0, config.head_dim, 2, device=device).double() / config.head_dim
    turns = torch.arange(len(prompt), device=device).double()[:, None] / attention.rope.theta**exponents
    cos_sin = torch.cat((turns.cos(), turns.sin()), -1).to(dtype)
    x = weight("model.embed_tokens")[torch.tensor(prompt, device=device)]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        normed = reference.rms_norm(x, weight(f"{name}.input_layernorm"), eps)
        q, k, v = (
            (normed @ weight(f"{name}.self_attn.{part}_proj").T).view(len(prompt), count, config.head_dim)
            for part, count in zip("qkv", heads, strict=True)
        )
        attention = config.design.layers[0].attention
        if isinstance(attention, SelfAttention) and attention.qk_norm:
            q = reference.rms_norm(q, weight(f"{name}.self_attn.q_norm"), eps)
            k = reference.rms_norm(k, weight(f"{name}.self_attn.k_norm"), eps)
        q, k = reference.rope(q, cos_sin), reference.rope(k, cos_sin)
        attended = reference.attention(
            q, k.transpose(0, 1), v.transpose(0, 1), reference.Scoring(config.head_dim**-0.5)
        )
        x = x + attended.flatten(1) @ weight(f"{name}.self_attn.o_proj").T
        normed = reference.rms_norm(x, weight(f"{name}.post_attention_layernorm"), eps)
        gate_up = torch.cat([normed @ weight(f"{name}.mlp.{part}_proj").T for part in ("gate", "up")], -1)
        x = x + reference.silu_mul(gate_up) @ weight(f"{name}.mlp.down_proj").T
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return reference.rms_norm(x, weight("model.norm"), eps) @ weight(head).T


# ---- graphs


def _graphs_agree(device: Device, model: Model) -> Iterator[Row]:
    """Decode as many sequences as each captured size holds, replayed and launched kernel by kernel."""
    max_num_seqs, context = device.sized((256, 500), (3, 20))
    engine = Engine.of(device, model, limits_of(max_num_seqs, max_num_seqs, context + 64))
    eager = CudaRunner(model, engine.num_pages, engine.page_size, engine.limits)
    replay_nothing(eager)
    for kv in (engine.runner.kv, eager.kv):
        kv.normal_(generator=torch.Generator(device.torch).manual_seed(2))
    for size in graph_sizes(max_num_seqs):
        plan = _decode_plan(size, context, engine.num_pages // max_num_seqs, engine.page_size)
        ours, theirs = ([tokens[0][0] for tokens in runner.run(plan).tokens] for runner in (engine.runner, eager))
        largest = max(abs(_chosen(a) - _chosen(b)) for a, b in zip(ours, theirs, strict=True))
        same = sum(a.token_id == b.token_id for a, b in zip(ours, theirs, strict=True))
        yield Row(f"graph of {size}", {"nats at most": largest}, f"{same} of {size} tokens", failed=not largest < 0.05)


def _chosen(token: SampledToken) -> float:
    assert token.logprobs is not None
    return token.logprobs.chosen


def _decode_plan(size: int, context: int, pages_each: int, page_size: int) -> StepPlan:
    params = SamplingParams(temperature=0.0, logprobs=1)

    def chunk(row: int) -> Chunk:
        start = context - row % page_size
        pages = tuple(PageId(row * pages_each + page) for page in range(start // page_size + 1))
        return Chunk((row % 250,), start, pages, (SampleSpec(params, row, 0, (), (), False, (row, 0)),))

    return StepPlan(tuple(map(chunk, range(size))))
