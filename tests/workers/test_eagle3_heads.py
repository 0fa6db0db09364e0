"""Heads of other models, and what no test has compared, are refused at the start by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import Tensors, head_config, random_head, write_head
from model_zoo import write_model
from mtp_modules import write_model_with_module
from worker_settings import built, settings_of

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.guesses import DraftsBy
from pdserve.executor import draft_loading, loading
from pdserve.executor.draft_loading import with_room
from pdserve.executor.head_files import open_head
from pdserve.model.config import ModelConfig
from pdserve.model.eagle3_config import read_head
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.link import layout_from_proto, layout_to_proto
from pdserve.worker.boot import Engine

LAYERS = (0, 1, 2)
ALIKE: dict[str, object] = {"global_head_dim": 32, "per_layer_config": None}  # heads of Gemma 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("target"))


def config_of(target: Path, **own: object) -> dict[str, Any]:
    return {**head_config(json.loads((target / "config.json").read_text()), 200, LAYERS), **own}


def started(target: Path, head: Path, **settings: object) -> Engine:
    given = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    own = {"num_pages": 40, "dtype": "float32", "speculative_config": given}
    engine = built(settings_of(target, **{**own, **settings}))
    engine.executor.close()
    return engine


def test_a_worker_with_a_head_has_pages_with_room_for_it_and_another_name_for_what_fills_them(
    target: Path, tmp_path: Path
) -> None:
    config = config_of(target, max_position_embeddings=60)
    first, second = (write_head(tmp_path / str(seed), config, random_head(config, seed)) for seed in (1, 2))
    plain = started(target, first, speculative_config=None)
    engines = [started(target, head) for head in (first, first, second)]
    limits = engines[0].scheduler.limits
    assert (limits.num_speculative_tokens, limits.guesser) == (5, DraftsBy(DraftSource.EAGLE3, 640))
    layouts = [engine.layout for engine in engines]
    assert layouts[0] == layouts[1] != layouts[2]
    assert {layout.num_layers for layout in layouts} == {4}
    assert plain.layout.num_layers == 3
    assert "weights_hash" in str(plain.layout.difference(layouts[0]))


@pytest.mark.parametrize(("family", "num_layers"), [("gpt-oss", [2, 2]), ("gemma2", [5])])
def test_routers_take_the_pages_of_a_model_with_windows_and_a_head(
    tmp_path: Path, family: str, num_layers: list[int]
) -> None:
    """Gemma 2's two full layers and the head beside its two windows would leave pages that are not filled."""
    target = write_model(family, tmp_path / "target")
    config = config_of(target)
    layout = started(target, write_head(tmp_path / "head", config, random_head(config))).layout
    assert layout_from_proto(layout_to_proto(layout)) == layout
    assert [layout.num_layers, *[group.num_layers for group in layout.others]] == num_layers


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "heads of two sizes"),
        (ALIKE, "layers that read keys and values of others"),
        ({**ALIKE, "num_kv_shared_layers": 0}, "inputs of each layer"),
    ],
)
def test_heads_are_refused_beside_models_that_no_test_has_seen_with_one(
    target: Path, tmp_path: Path, changes: dict[str, object], kind: str
) -> None:
    config = config_of(target)
    drafts = open_head(write_head(tmp_path / "head", config, random_head(config)), open_directory(target).config)
    beside = write_model("gemma4-shared", tmp_path / "beside")
    raw = json.loads((beside / "config.json").read_text())
    (beside / "config.json").write_text(json.dumps({**raw, **changes}))
    checkpoint = open_directory(beside)
    with pytest.raises(
        ConfigError, match=f"speculative_config.method: eagle3 is not served beside a model with {kind}"
    ):
        with_room(checkpoint, drafts)


def test_a_head_without_room_beside_pages_that_are_not_taken_yet_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_head(config_of(target))
    head = write_head(tmp_path / "head", config_of(target), tensors)
    head_bytes = sum(each.nbytes for name, each in tensors.items() if name not in ("d2t", "t2d"))
    page_bytes = started(target, head).layout.memory_bytes(40, 256)
    for module in (loading, draft_loading):
        monkeypatch.setattr(module, "available_bytes", lambda: page_bytes + head_bytes)
    started(target, head)
    for module in (loading, draft_loading):
        monkeypatch.setattr(module, "available_bytes", lambda: page_bytes + head_bytes - 1)
    problem = f"takes {head_bytes} bytes, and {head_bytes - 1} are left beside the model and its KV pages"
    with pytest.raises(ConfigError, match=rf"^speculative_config\.model: {head}: {problem}"):
        started(target, head)


def test_a_tensor_of_a_head_that_cannot_be_read_is_named_with_the_heads_path(target: Path, tmp_path: Path) -> None:
    tensors = random_head(config_of(target))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    head = write_head(tmp_path / "head", config_of(target), tensors)
    with pytest.raises(
        ConfigError, match=rf"^speculative_config\.model: {head}: lm_head\.weight: torch\.float8_e4m3fn"
    ):
        started(target, head)


def test_the_form_of_the_speculators_library_says_the_same(target: Path, tmp_path: Path) -> None:
    config = config_of(target)
    own = {key: config.pop(key) for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "architectures")}
    more = {"speculators_config": {"algorithm": "eagle3"}, "speculators_model_type": "eagle3", "norm_before_fc": False}
    outer = {**own, **more, "architectures": ["Eagle3DraftModel"], "transformer_layer_config": config}
    tensors = {name.replace("midlayer", "layers.0"): each for name, each in random_head({**config, **own}).items()}
    tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"])
    assert started(target, write_head(tmp_path / "head", outer, tensors)).scheduler.speculation.source == "eagle3"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: each for key, each in tensors.items() if key != name}


Q = "midlayer.self_attn.q_proj.weight"


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: change(each) if key == name else each for key, each in tensors.items()}


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"hidden_size": 128}, "hidden_size: 128, and the model that it guesses for asks for 64"),
        ({"target_hidden_size": 96}, "target_hidden_size: 96"),
        ({"vocab_size": 500}, "vocab_size: 500"),
        ({"draft_vocab_size": 600}, "draft_vocab_size: 600 is over vocab_size 512"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: 4"),
        ({"head_dim": 32}, "head_dim: 32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "eagle_aux_hidden_state_layer_ids: .* of 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"eagle_aux_hidden_state_layer_ids: \[2, 1, 0\]"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "eagle_aux_hidden_state_layer_ids: .* a list of integers"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_head_that_does_not_fit_its_model_is_refused_by_the_key(
    target: Path, tmp_path: Path, own: dict[str, object], problem: str
) -> None:
    head = write_head(tmp_path / "head", config_of(target, **own), random_head(config_of(target)))
    with pytest.raises(ConfigError, match=rf"^speculative_config\.model: {head}: config\.json: .*{problem}"):
        started(target, head)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("fc.weight"), r"fc\.weight: missing"),
        (without("midlayer.hidden_norm.weight"), r"midlayer\.hidden_norm\.weight: missing"),
        (without("lm_head.weight"), r"lm_head\.weight: missing"),
        (without("d2t"), "d2t: missing"),
        (changed("fc.weight", lambda each: each[:, 64:].contiguous()), r"fc\.weight: shape"),
        (changed(Q, lambda each: each[:, 64:].contiguous()), f"{Q}: shape"),
        (changed("d2t", lambda each: each + 512), "d2t: does not name 200 of the model's 512 tokens"),
        (changed("d2t", lambda each: each - 512), "d2t: does not name"),
        (changed("d2t", lambda each: -torch.arange(200)), "d2t: does not name"),
        (changed("d2t", lambda each: each[:-1]), "d2t: shape"),
        (changed("t2d", lambda each: each[:-1]), "t2d: shape"),
        (changed("t2d", lambda each: ~each), "t2d: marks other tokens"),
        (lambda tensors: {**tensors, "layers.1.bias": torch.ones(3)}, r"layers\.1\.bias: not a tensor of an EAGLE-3"),
    ],
)
def test_tensors_that_are_no_heads_are_refused_by_their_names(
    target: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], problem: str
) -> None:
    config = config_of(target)
    head = write_head(tmp_path / "head", config, change(random_head(config)))
    with pytest.raises(ConfigError, match=rf"^speculative_config\.model: {head}: {problem}"):
        started(target, head)


def test_a_head_in_a_pickle_is_refused(target: Path, tmp_path: Path) -> None:
    config = config_of(target)
    head = write_head(tmp_path / "head", config, random_head(config))
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickles run code: convert it to safetensors"):
        started(target, head)


@pytest.mark.parametrize("family", ["mistral", "deepseek-v2", "llama4"])
def test_a_family_that_no_head_was_tested_with_is_refused(tmp_path: Path, family: str) -> None:
    target = write_model(family, tmp_path / "target")
    head = write_head(tmp_path / "head", {"architectures": ["LlamaForCausalLMEagle3"]}, {"d2t": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"^speculative_config\.model: .*heads were tested with Llama"):
        started(target, head)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, r"speculative_config\.method: eagle3 is not served"),
        (
            {"tensor_parallel_size": 2, "rank_memory": "own"},
            "speculative_config.method: eagle3 is not served with rank_memory own by several ranks on CPUs yet",
        ),
    ],
)
def test_settings_that_no_head_was_tested_with_are_refused(
    target: Path, tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        started(target, tmp_path, **settings)


@pytest.mark.parametrize(
    "own",
    [
        {"max_window_layers": 48, "use_sliding_window": False, "sliding_window": None, "mlp_bias": False},
        {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
        {"eagle_config": {"use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False}},
    ],
)
def test_keys_of_published_heads_that_change_nothing_are_read(
    target: Path, tmp_path: Path, own: dict[str, object]
) -> None:
    config = config_of(target, **own)
    tensors = {f"model.{name}": each for name, each in random_head(config).items() if name.startswith("midlayer")}
    others = {name: each for name, each in random_head(config).items() if not name.startswith("midlayer")}
    head = write_head(tmp_path / "head", config, {**others, **tensors})
    assert started(target, head).scheduler.speculation.source == "eagle3"


@pytest.mark.parametrize("given", [None, [2, 18, 33], [1, 17, 32]])
def test_numbers_of_layers_that_begin_with_one_are_of_those_behind_which_states_are_read(
    target: Path, given: list[int] | None
) -> None:
    raw = json.loads((target / "config.json").read_text())
    model = ModelConfig.from_hf({**raw, "num_hidden_layers": 36})
    assert read_head(config_of(target, eagle_aux_hidden_state_layer_ids=given), model).layers == (2, 18, 33)


def with_module(folder: Path, **settings: object) -> Engine:
    return started(folder, folder, speculative_config={"method": "mtp"}, **settings)


def test_a_models_own_module_needs_no_other_directory(tmp_path: Path) -> None:
    engine = with_module(write_model_with_module("glm4-moe", tmp_path))
    assert engine.scheduler.speculation.source == "mtp"
    assert (engine.layout.num_layers, engine.layout.weights_hash.endswith(" head 3 mtp")) == (4, True)


def test_a_model_without_a_module_is_refused_by_the_tensors_that_are_missing(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config\.method: mtp: .*model\.layers\.3\..*missing"):
        with_module(write_model("glm4-moe", tmp_path))
    with pytest.raises(ConfigError, match=r"^speculative_config\.method: mtp: modules were tested of Deepseek"):
        with_module(target)
    with pytest.raises(ConfigError, match=r"speculative_config\.method: mtp is not served with kv_cache_dtype"):
        with_module(target, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="goes with method draft_model or eagle3, not with mtp"):
        started(target, tmp_path, speculative_config={"method": "mtp", "model": "x"})
