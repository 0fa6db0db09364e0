"""Ranks that hold a model together compute in float32 what one rank computes; each has its share of the weights."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from greedy_runs import greedy_texts
from long_cases import long_but
from model_zoo import MORE_FAMILIES, STATES, load_oracle, prompt
from noted_programs import has_bfloat16_products, note_program_rows
from numpy import frombuffer
from thread_ranks import thread_ranks
from torch import Tensor

from pdserve.base.errors import ConfigError
from pdserve.base.ids import PageId
from pdserve.checkpoint.checkpoint import Checkpoint, in_form
from pdserve.engine.runner import Runner
from pdserve.engine.step import Chunk, StepPlan
from pdserve.executor.rank_sums import SharedRanks, ranks_of, slots_bytes
from pdserve.model.attention import Attention
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.family import Model
from pdserve.model.loading import load_model, load_rank
from pdserve.model.ops import weight_bytes
from pdserve.model.sharding import check_divides
from pdserve.model.taps import Tap
from pdserve.model.weights import Rank, Stored, Weights
from pdserve.protocol.pooling import Pooling
from pdserve.settings.degrees import Degrees

NUM_PAGES, NUM_TOKENS, CHUNK = 50, 10, 37
PROMPTS = [prompt(count, count) for count in (5, 45, 150)]
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}  # as SmolLM2 has them
THREE_PARTS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "moe_intermediate_size": 64}
LLAMA = "llama3"
BEFORE_GATES = {"mamba_n_groups": 1, "mamba_norm_before_gate": True}
PLAIN = {LLAMA, "qwen2-moe", "gemma3"}
UNLIKE = {LLAMA, "cohere2", "deepseek-v3", "gemma3", "gpt-oss", "olmo2"}
FAMILIES = sorted({*MORE_FAMILIES, LLAMA, "mistral"})


pytestmark = pytest.mark.usefixtures("one_thread")


def weight_total(model: Model) -> int:
    return sum(map(weight_bytes, model.matrices()))


def texts(
    config: ModelConfig, weights: Weights, size: int, dtype: torch.dtype = torch.float32, num_stages: int = 1
) -> list[list[int]]:
    if size * num_stages == 1:
        whole = Runner(load_model(config, weights, dtype), NUM_PAGES, 16)
        return greedy_texts(whole, PROMPTS, NUM_TOKENS, CHUNK)
    with thread_ranks(Degrees(size, num_stages), config, weights, dtype, NUM_PAGES) as ranks:
        return greedy_texts(ranks, PROMPTS, NUM_TOKENS, CHUNK)


def assert_ranks_are_as_one(checkpoint: Checkpoint, size: int, num_stages: int = 1) -> list[list[int]]:
    found = texts(checkpoint.config, checkpoint.weights(), size, num_stages=num_stages)
    assert found == texts(checkpoint.config, checkpoint.weights(), 1)
    return found


def assert_right(checkpoint: Checkpoint, found: list[list[int]]) -> None:
    """Compare greedy answers with transformers'."""
    oracle = load_oracle(checkpoint.path)
    for asked, answer in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([asked])
        right = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert answer == right[0, len(asked) :].tolist()


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        (LLAMA, 2, {}),
        (LLAMA, 4, {}),  # two ranks have the same KV head
        (LLAMA, 3, NINE_HEADS),
        (LLAMA, 2, {**NINE_HEADS, "vocab_size": 511}),  # one KV head, and two; 255 tokens, and 256
        ("olmo2", 4, {}),
        ("qwen2", 2, {}),
        ("qwen3", 2, {}),
        ("gemma4", 2, {}),
        ("gemma4", 4, {}),
        ("gemma4-shared", 2, {}),
        ("gemma4-shared", 8, {}),  # two ranks have the same KV head
        ("lfm2", 4, {}),
        ("qwen3.5", 4, {"linear_num_key_heads": 4}),
        ("qwen3.5", 3, {**NINE_HEADS, "linear_num_key_heads": 5, "linear_num_value_heads": 10}),  # one head, and two
        ("falcon-h1", 2, {}),
        ("granite-hybrid", 4, {"num_experts_per_tok": 3}),
        ("nemotron-h", 2, {}),
        ("nemotron-h-moe", 2, {"num_experts_per_tok": 2}),
        ("nemotron-h-latent", 2, {"num_experts_per_tok": 2}),
        ("falcon-h1", 4, {"mamba_rms_norm": False, "mamba_n_heads": 4, "mamba_d_ssm": 64}),  # two have the same group
    ],
)
def test_ranks_draw_the_tokens_of_one_rank_and_of_transformers(
    opened: Callable[..., Checkpoint], family: str, size: int, shape: dict[str, int]
) -> None:
    checkpoint = opened(family, **shape)
    assert_right(checkpoint, assert_ranks_are_as_one(checkpoint, size))


@pytest.mark.parametrize(
    ("family", "num_stages"),
    [(LLAMA, 2), (LLAMA, 3), ("qwen3", 2), ("gemma3", 2), ("gemma3", 4), ("gemma4", 2), ("qwen3-moe", 2)],
)
def test_pipeline_stages_draw_the_tokens_of_one_rank_and_of_transformers(
    opened: Callable[..., Checkpoint], family: str, num_stages: int
) -> None:
    checkpoint = opened(family)
    assert_right(checkpoint, assert_ranks_are_as_one(checkpoint, 1, num_stages))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_draw_the_tokens_of_one_rank_in_each_family(opened: Callable[..., Checkpoint], family: str) -> None:
    assert_ranks_are_as_one(opened(family), 2)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*STATES, "gemma4-shared"}))
def test_pipeline_stages_draw_the_tokens_of_one_rank_in_each_family(
    opened: Callable[..., Checkpoint], family: str
) -> None:
    assert_ranks_are_as_one(opened(family), 1, 2)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({}, "layers that read keys and values of others"),
        ({"num_kv_shared_layers": 0}, "inputs of each layer"),
    ],
)
def test_layers_that_share_more_than_hidden_states_are_refused_in_stages(
    opened: Callable[..., Checkpoint], shape: dict[str, int], kind: str
) -> None:
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size: 2: {kind} are not served in stages yet"):
        check_divides(opened("gemma4-shared", **shape).config, Degrees(1, 2))


def test_each_rank_reads_its_share_of_the_weights(opened: Callable[..., Checkpoint]) -> None:
    checkpoint = opened(LLAMA)
    whole = weight_total(load_model(checkpoint.config, checkpoint.weights(), torch.float32))
    with thread_ranks(Degrees(2), checkpoint.config, checkpoint.weights(), torch.float32, NUM_PAGES) as ranks:
        assert [weight_total(model) for model in ranks.models] == pytest.approx([whole / 2] * 2, rel=0.03)


@pytest.mark.parametrize("tied", [False, True])
def test_each_pipeline_stage_reads_its_layers_and_what_is_before_or_behind_them(
    opened: Callable[..., Checkpoint], tied: bool
) -> None:
    checkpoint = opened(LLAMA, num_hidden_layers=4, tie_word_embeddings=tied)
    read = [set[str]() for _ in range(3)]

    def noting(stage: int, name: str, stored: Stored) -> Stored:
        return replace(stored, read=lambda part: read[stage].add(name) or stored.read(part))

    slots = torch.zeros(slots_bytes(Degrees(1, 3)), dtype=torch.uint8)
    for index in range(3):
        rank = Rank.at(index, Degrees(1, 3))
        weights = {name: noting(rank.stage, name, stored) for name, stored in checkpoint.weights().items()}
        load_rank(checkpoint.config, weights, torch.float32, ranks_of(rank, slots, [], 1.0))
    layers = [{int(name.split(".")[2]) for name in names if name.startswith("model.layers.")} for names in read]
    assert layers == [{0}, {1}, {2, 3}]
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    others = [names & {embedding, head} for names in read]
    assert others == ([{embedding}, set(), {embedding}] if tied else [{embedding}, set(), {head}])


def test_stages_share_out_layers_as_evenly_as_their_number_lets_them() -> None:
    for num_layers in range(1, 20):
        for num_stages in range(1, num_layers + 1):
            found = [Rank(stage=stage, num_stages=num_stages).layers(num_layers) for stage in range(num_stages)]
            assert [layer for of in found for layer in of] == list(range(num_layers))
            assert max(map(len, found)) - min(map(len, found)) <= 1


def test_scores_are_those_of_one_rank_whatever_others_hold_in_place_of_the_gathered_logits(
    opened: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = SharedRanks.gather

    def of_the_first(ranks: SharedRanks, x: Tensor, width: int) -> Tensor:
        return gather(ranks, x, width) if ranks.rank.index == 0 else gather(ranks, x, width).fill_(math.nan)

    monkeypatch.setattr(SharedRanks, "gather", of_the_first)
    checkpoint = opened(LLAMA)
    given = (checkpoint.config, checkpoint.weights(), torch.float32)
    chunk = Chunk(PROMPTS[0], 0, (PageId(1),), (), pooling=Pooling("logits", (3, 9)))
    with thread_ranks(Degrees(2), *given, NUM_PAGES) as ranks:
        found = ranks.run(StepPlan((chunk,))).pooled
    expected = Runner(load_model(*given), NUM_PAGES, 16).run(StepPlan((chunk,))).pooled
    assert abs(frombuffer(found[0], "<f4") - frombuffer(expected[0], "<f4")).max() < 1e-4


def test_vectors_of_pipeline_stages_are_those_of_one_rank(opened: Callable[..., Checkpoint]) -> None:
    checkpoint = opened(LLAMA)
    given = (checkpoint.config, checkpoint.weights(), torch.float32)
    poolings = (Pooling("logits", (3, 9)), Pooling("last"), Pooling("mean"))
    plan = StepPlan(tuple([Chunk(PROMPTS[0], 0, (PageId(i),), (), pooling=of) for i, of in enumerate(poolings)]))
    with thread_ranks(Degrees(1, 3), *given, NUM_PAGES) as ranks:
        found = ranks.run(plan).pooled
    assert found == Runner(load_model(*given), NUM_PAGES, 16).run(plan).pooled


@pytest.fixture
def program_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return where a rank notes the rows of a step that it runs as a program."""
    return note_program_rows(monkeypatch)


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        (LLAMA, 2, {"intermediate_size": 96}),  # one group, and two
        ("nemotron", 2, {"intermediate_size": 96}),  # whose MLPs have no gates
        ("lfm2", 2, {}),
        ("qwen3.5", 2, {"linear_value_head_dim": 16}),
        (LLAMA, 4, {"hidden_size": 128, "intermediate_size": 128}),
        (LLAMA, 3, {**NINE_HEADS, "hidden_size": 288, "intermediate_size": 288}),
    ],
)
def test_quantized_matrices_are_divided_in_whole_groups_and_decode_steps_are_programs(
    opened: Callable[..., Checkpoint], family: str, size: int, shape: dict[str, int], program_rows: list[int]
) -> None:
    checkpoint = opened(family, **shape)
    in_groups = in_form(checkpoint.weights(), "int8")
    found = texts(checkpoint.config, in_groups, size)
    assert program_rows.count(3) > 4 * size
    assert found == texts(checkpoint.config, in_groups, 1)


@pytest.mark.parametrize("family", [LLAMA, "gemma3", "qwen3-moe"])
def test_decode_programs_of_pipeline_stages_give_the_tokens_of_one_rank(
    opened: Callable[..., Checkpoint], family: str, program_rows: list[int]
) -> None:
    checkpoint = opened(family)
    in_groups = in_form(checkpoint.weights(), "int8")
    found = texts(checkpoint.config, in_groups, 1, num_stages=3)
    assert program_rows.count(3) > 4 * 3
    assert found == texts(checkpoint.config, in_groups, 1)


@pytest.mark.parametrize("family", long_but(PLAIN, FAMILIES))
def test_decode_programs_of_ranks_compute_what_one_operation_after_the_other_does(
    opened: Callable[..., Checkpoint], family: str, monkeypatch: pytest.MonkeyPatch, program_rows: list[int]
) -> None:
    monkeypatch.setattr("pdserve.model.ops_cpu._has_matrix_units", lambda: False)  # which oneDNN would multiply with
    checkpoint = opened(family)
    config = checkpoint.config
    grows = config.longest_without_growth is not None  # of which the longest prompt is longer
    is_served = not (config.attends_in_torch or config.design.has_wide_norms or grows)
    if is_served and not has_bfloat16_products():
        pytest.skip("this processor has no products of bfloat16")
    given = (config, checkpoint.weights(), 2, torch.bfloat16)
    found = texts(*given)
    assert bool(program_rows) == is_served
    program_rows.clear()
    monkeypatch.setattr("pdserve.engine.runner.is_compiled", lambda _: False)
    assert texts(*given) == found
    assert not program_rows


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [
        *(pytest.param(each, 2, {}, marks=() if each in UNLIKE else pytest.mark.long) for each in FAMILIES),
        ("qwen2-moe", 3, THREE_PARTS),
    ],
)
def test_all_ranks_have_the_same_hidden_states_to_the_bit(
    opened: Callable[..., Checkpoint], family: str, size: int, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, hidden = [list[Tensor]() for _ in range(size)], Decoder.hidden

    def noted(model: Decoder, ids: Tensor, attention: Attention, rows: Tensor | None, tap: Tap) -> Tensor:
        found = hidden(model, ids, attention, rows, tap)
        seen[model.rank.index].append(found.clone())
        return found

    monkeypatch.setattr(Decoder, "hidden", noted)
    monkeypatch.setattr("pdserve.engine.runner.is_compiled", lambda _: False)
    checkpoint = opened(family, **shape)
    texts(checkpoint.config, checkpoint.weights(), size, torch.bfloat16)
    for others in seen[1:]:
        assert len(others) > NUM_TOKENS
        assert all(torch.equal(*each) for each in zip(seen[0], others, strict=True))


def test_experts_of_an_odd_number_of_features_are_refused_by_name(opened: Callable[..., Checkpoint]) -> None:
    odd = opened("qwen2-moe", moe_intermediate_size=63)
    check_divides(odd.config, Degrees(1))
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 2: an odd number of features of each expert"):
        check_divides(odd.config, Degrees(2))


@pytest.mark.parametrize("family", STATES)
def test_stages_of_layers_with_a_state_are_refused_by_name(opened: Callable[..., Checkpoint], family: str) -> None:
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size: 2: layers with a state are not tried"):
        check_divides(opened(family).config, Degrees(1, 2))


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        ("qwen3.5", {}, "2 heads of keys of a delta net cannot"),
        ("falcon-h1", {"mamba_n_heads": 8, "mamba_d_ssm": 128, **BEFORE_GATES}, "a norm of states before their gate"),
        ("falcon-h1", {}, "6 heads of states in 2 groups cannot"),
        ("falcon-h1", {"mamba_n_heads": 8, "mamba_d_ssm": 128}, "2 groups of states with a norm are not"),
    ],
)
def test_states_of_which_a_rank_has_no_part_are_refused_by_name(
    opened: Callable[..., Checkpoint], family: str, shape: dict[str, int], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size: 4: {reason}"):
        check_divides(opened(family, **shape).config, Degrees(4))


@pytest.mark.parametrize("family", STATES)
def test_ranks_leave_the_states_of_one_rank(opened: Callable[..., Checkpoint], family: str) -> None:
    checkpoint = opened(family)
    given = (checkpoint.config, checkpoint.weights(), torch.float32)
    whole = Runner(load_model(*given), NUM_PAGES, 16)
    with thread_ranks(Degrees(2), *given, NUM_PAGES) as ranks:
        for runner in (whole, ranks):
            greedy_texts(runner, PROMPTS, NUM_TOKENS, CHUNK)
        torch.testing.assert_close(ranks.kv, whole.kv, atol=1e-4, rtol=1e-4)
    assert whole.kv.view(NUM_PAGES, -1).any(1).sum() > 2 * len(PROMPTS)


def test_more_stages_than_layers_are_refused_by_name(opened: Callable[..., Checkpoint]) -> None:
    config = opened(LLAMA).config
    check_divides(config, Degrees(1, 3))
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size: 4: the model has 3 layers"):
        check_divides(config, Degrees(1, 4))


@pytest.mark.parametrize("family", [LLAMA, "qwen2-moe", "gpt-oss", "olmo2"])
def test_ranks_keep_nearly_the_same_keys_and_values_in_bfloat16(opened: Callable[..., Checkpoint], family: str) -> None:
    checkpoint = opened(family)
    given = (checkpoint.config, checkpoint.weights(), torch.bfloat16)
    whole = Runner(load_model(*given), NUM_PAGES, 16)
    with thread_ranks(Degrees(2), *given, NUM_PAGES) as ranks:
        for runner in (whole, ranks):
            greedy_texts(runner, PROMPTS, 1, CHUNK)
        difference = (ranks.kv.float() - whole.kv.float()).abs()
    assert difference.mean() < 0.02 * whole.kv.float().abs().mean()
