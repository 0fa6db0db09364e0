"""A GGUF file of each family with states gives transformers' logits; what such files do not say is refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_logits import CLOSE, PROMPT, logits_of
from gguf_models import Case, random_model, round_matrices, write_gguf
from gguf_state_models import NARROW, STATE_CASES

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.gguf_config import hf_config
from pdserve.checkpoint.gguf_file import GgufFile, GgufTensor, read_gguf
from pdserve.checkpoint.gguf_weights import read_weights
from pdserve.checkpoint.open import open_checkpoint
from pdserve.model.config import ModelConfig
from pdserve.model.family import Model
from pdserve.model.groups import GROUP, Groups
from pdserve.model.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("kind", [None, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("name", STATE_CASES)
def test_logits_of_a_gguf_file_are_those_of_transformers(
    name: str, kind: GGMLQuantizationType | None, tmp_path: Path
) -> None:
    case, model = STATE_CASES[name], random_model(STATE_CASES[name])
    if kind is not None:
        round_matrices(model, kind)
    path = write_gguf(case, model, tmp_path / "tiny.gguf", kind)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(path), expected, **CLOSE)


@pytest.mark.parametrize("case", [*STATE_CASES.values(), NARROW], ids=[*STATE_CASES, "narrow"])
def test_codes_that_are_kept_mean_what_the_file_means(case: Case, tmp_path: Path) -> None:
    path = write_gguf(case, random_model(case), tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(path)
    assert checkpoint.coded_weights is not None
    floats, coded = checkpoint.weights(), checkpoint.coded_weights()
    assert floats.keys() == coded.keys()
    kept = 0
    for tensor, stored in coded.items():
        read, expected = stored.read(()), floats[tensor].read(())
        kept += isinstance(read, Groups)
        assert isinstance(read, Groups) == (stored.codes is not None), tensor
        np.testing.assert_allclose(read.values() if isinstance(read, Groups) else read, expected, rtol=1e-6, atol=1e-7)
    assert kept > 8


SPACE = {"conv_kernel": 4, "group_count": 1, "inner_size": 64, "state_size": 16, "time_step_rank": 4}
KEYS = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    **{f"ssm.{key}": value for key, value in SPACE.items()},
}
GRANITE = {"attention.scale": 1.0, "logit_scale": 1.0}
LAYERS = ("blk.0.ssm_in.weight", "blk.1.attn_q.weight")


@pytest.mark.parametrize(
    ("architecture", "keys", "layers", "complaint"),
    [
        (
            "granitehybrid",
            {**GRANITE, "rope.scaling.finetuned": True},
            LAYERS,
            r"granitehybrid\.rope\.scaling\.finetuned: True",
        ),
        ("granitehybrid", {**GRANITE, "ssm.inner_size": 40}, LAYERS, r"granitehybrid\.embedding_length: 32"),
        ("granitehybrid", {**GRANITE, "ssm.state_size": None}, LAYERS, r"granitehybrid\.ssm\.state_size: missing"),
        ("granitehybrid", GRANITE, LAYERS[:1], r"blk\.1: the file has none of ssm_in, attn_q"),
        (
            "granitehybrid",
            {**GRANITE, "attention.head_count_kv": [2, 4]},
            LAYERS,
            r"granitehybrid\.attention\.head_count_kv: \[2, 4\]",
        ),
        ("granitehybrid", {**GRANITE, "moe_latent_size": 16}, LAYERS, r"granitehybrid\.moe_latent_size: 16"),
        (
            "granite",
            {**GRANITE, "attention.head_count_kv": [2, 0]},
            LAYERS,
            r"granite\.attention\.head_count_kv: \[2, 0",
        ),
        ("falcon-h1", {}, LAYERS, r"output\.weight: the file has no such matrix"),
        ("granitehybrid", {**GRANITE, "nextn_predict_layers": 1}, LAYERS, r"granitehybrid\.nextn_predict_layers: 1"),
        ("lfm2", {}, ("blk.0.shortconv.conv.weight", LAYERS[1]), r"lfm2\.shortconv\.l_cache: missing"),
        ("nemotron_h", {"ssm.time_step_rank": 5}, LAYERS, r"nemotron_h\.ssm\.time_step_rank: 5"),
        ("qwen35", {"ssm.time_step_rank": 3}, ("blk.0.ssm_out.weight", LAYERS[1]), r"qwen35\.ssm\.time_step_rank: 3"),
        ("qwen3next", {"expert_weights_scale": 2.0}, ("blk.0.ssm_out.weight", LAYERS[1]), "expert_weights_scale: 2"),
    ],
)
def test_what_files_with_states_must_say_is_asked_for_by_name(
    architecture: str, keys: dict[str, object], layers: tuple[str, ...], complaint: str
) -> None:
    given = {f"{architecture}.{key}": value for key, value in {**KEYS, **keys}.items() if value is not None}
    tensors = tuple([GgufTensor(name, (100, 32), 0, 0) for name in ("token_embd.weight", *layers)])
    file = GgufFile(Path("x.gguf"), {"general.architecture": architecture, **given}, tensors)
    with pytest.raises(ConfigError, match=complaint):
        ModelConfig.from_hf(hf_config(file))


@pytest.mark.parametrize(
    ("name", "lost", "complaint"),
    [
        ("granitehybrid", "ffn_up_shexp", r"shared_mlp\.up\.weight: the file has no such tensor"),
        ("qwen3next", "attn_gate", r"linear_attn\.in_proj_z\.weight: the file has no such tensor"),
        ("lfm2", "shortconv.conv", r"blk\.0: the file has none of shortconv\.conv, attn_q"),
        ("falcon-h1", "ssm_a", r"mamba\.A_log"),
    ],
)
def test_tensors_that_a_file_lacks_are_named(name: str, lost: str, complaint: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(STATE_CASES[name], random_model(STATE_CASES[name]), tmp_path / "tiny.gguf"))
    kept = replace(file, tensors=tuple([tensor for tensor in file.tensors if lost not in tensor.name]))
    with pytest.raises(ConfigError, match=complaint):
        loaded(kept)


def loaded(file: GgufFile) -> Model:
    config = ModelConfig.from_hf(hf_config(file))
    return load_model(config, read_weights(file, config), torch.float32)


def test_heads_that_are_no_whole_groups_of_codes_are_put_in_order(tmp_path: Path) -> None:
    model = random_model(NARROW)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(write_gguf(NARROW, model, tmp_path / "tiny.gguf")), expected, **CLOSE)


def test_a_convolution_with_a_bias_is_refused(tmp_path: Path) -> None:
    case = replace(STATE_CASES["lfm2"], shape={"conv_bias": True})
    path = write_gguf(case, random_model(case), tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"conv\.conv\.bias"):
        logits_of(path)


@pytest.mark.parametrize("name", ["falcon-h1", "granitehybrid", "lfm2", "nemotron_h_moe", "qwen3next", "qwen35"])
def test_a_rank_reads_its_part_of_codes(name: str, tmp_path: Path) -> None:
    """Rows and inputs that are cut from what is kept coded are those of the whole."""
    case = STATE_CASES[name]
    path = write_gguf(case, random_model(case), tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(path)
    assert checkpoint.coded_weights is not None
    for tensor, stored in checkpoint.coded_weights().items():
        if len(stored.shape) != 2:
            continue
        whole, rows = values_of(stored.read(())), slice(1, stored.shape[0])
        np.testing.assert_array_equal(values_of(stored.read((rows,))), whole[rows], tensor)
        if stored.shape[1] >= 2 * GROUP:
            inputs = slice(GROUP, 2 * GROUP)
            np.testing.assert_array_equal(values_of(stored.read((rows, inputs))), whole[rows, inputs], tensor)


def values_of(read: object) -> object:
    return read.values() if isinstance(read, Groups) else np.asarray(read)
