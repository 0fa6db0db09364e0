"""Text parts of models that also see images answer as these models do without images."""

import json
from pathlib import Path

import pytest
import torch
from greedy_runs import greedy_texts
from held_weights import held
from loaded_models import loaded_model
from model_zoo import WITH_IMAGES, first_disagreement, load_oracle, prompt, write_model

from pdserve.base.errors import ConfigError
from pdserve.engine.runner import Runner
from pdserve.model.config import ModelConfig
from pdserve.model.wrappers import text_tensors

TEXT = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
GEMMA_3_4B = {  # as it is published, but for what the vision part says
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {**TEXT, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_a_text_part_answers_as_the_whole_model_does(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path / family)
    model, oracle = loaded_model(folder), load_oracle(folder)
    prompts = [prompt(length) for length in (1, 40, 300)]
    for asked, answer in zip(prompts, greedy_texts(Runner(model, 100, 16), prompts, 24, 17), strict=True):
        assert len(set(answer)) > 4
        assert first_disagreement(oracle, asked, answer) is None


def test_what_a_published_config_leaves_out_is_what_it_means() -> None:
    config = ModelConfig.from_hf(GEMMA_3_4B)
    assert (config.architecture, config.dtype, config.eos_token_ids) == ("Gemma3ForCausalLM", "bfloat16", (1, 106))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (131072, True)
    assert config.windows[:6] == (1024,) * 5 + (None,)


def test_tensors_of_other_parts_are_left_out_and_newer_names_are_known() -> None:
    names = {
        "language_model.model.norm.weight": "model.norm.weight",
        "model.language_model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "vision_tower.embeddings.weight": None,
        "model.vision_tower.embeddings.weight": None,
        "multi_modal_projector.norm.weight": None,
    }
    for name, expected in names.items():
        assert list(text_tensors(held({name: torch.ones(1)}), GEMMA_3_4B)) == ([] if expected is None else [expected])
    plain = held({"vision_tower.x": torch.ones(1)})
    assert text_tensors(plain, {"architectures": ["LlamaForCausalLM"]}) is plain


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_config": None}, "text_config: missing"),
        ({"text_config": {**TEXT, "model_type": "llama"}}, "text_config.model_type: 'llama' is not supported"),
        ({"text_config": {**TEXT, "kv_lora_rank": 8}}, "kv_lora_rank: 8 is not supported"),
        ({"audio_config": {}}, "audio_config: {} is not supported"),
        ({"text_config": {**TEXT, "hidden_size": "wide"}}, "hidden_size: 'wide' is not an integer"),
    ],
)
def test_what_is_not_known_of_a_whole_or_its_text_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}"):
        ModelConfig.from_hf(json.loads(json.dumps(GEMMA_3_4B | changes)))
