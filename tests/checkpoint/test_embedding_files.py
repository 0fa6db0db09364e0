"""How a model makes vectors is read from the files of sentence-transformers, and what is not served is named."""

import re
from collections.abc import Mapping

import pytest
import torch

from pdserve.checkpoint.embedding import GENERATING, Embedding, of_gguf, read_embedding
from pdserve.checkpoint.hf_directory import whole
from pdserve.model.weights import Stored
from pdserve.protocol.pooling import Pooling

SIZE = 64
MODULE = "sentence_transformers.models"


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    return [{"path": path, "type": f"{MODULE}.{kind}"} for path, kind in zip(paths, kinds, strict=True)]


def pooling(**modes: object) -> dict[str, object]:
    return {"word_embedding_dimension": SIZE, "pooling_mode_cls_token": False, **modes}


def read(files: Mapping[str, object]) -> Embedding:
    return read_embedding(files.get, SIZE)


def test_without_files_it_is_the_last_token_of_length_1() -> None:
    assert read({}) == GENERATING == Embedding(Pooling("last", normalizes=True))


@pytest.mark.parametrize(
    ("kinds", "config", "expected"),
    [
        (("Normalize",), pooling(pooling_mode_lasttoken=True), Pooling("last", normalizes=True)),
        ((), pooling(pooling_mode_lasttoken=True), Pooling("last")),
        (("Normalize",), pooling(pooling_mode_mean_tokens=True), Pooling("mean", normalizes=True)),
        ((), {"embedding_dimension": SIZE, "pooling_mode": "mean"}, Pooling("mean")),
        ((), {"embedding_dimension": SIZE, "pooling_mode": "lasttoken"}, Pooling("last")),
    ],
)
def test_poolings_that_are_served(kinds: tuple[str, ...], config: object, expected: Pooling) -> None:
    files = {"modules.json": modules("Transformer", "Pooling", *kinds), "1_Pooling/config.json": config}
    assert read(files) == Embedding(expected)
    assert read({**files, "sentence_bert_config.json": {"max_seq_length": 512}}).max_tokens == 512


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"modules.json": {}}, "modules.json: is not a list"),
        ({"modules.json": modules("Transformer", "Pooling", "Dense", "Normalize")}, "modules.json: .*Dense"),
        ({"modules.json": modules("Transformer")}, "modules.json: Transformer are not served"),
        ({"1_Pooling/config.json": None}, "1_Pooling/config.json: missing"),
        ({"1_Pooling/config.json": pooling(pooling_mode_max_tokens=True)}, "pooling_mode_max_tokens: is not served"),
        ({"1_Pooling/config.json": pooling()}, "1_Pooling/config.json: pooling_mode: is not served"),
        (
            {"1_Pooling/config.json": pooling(pooling_mode_lasttoken=True, pooling_mode_mean_tokens=True)},
            "pooling_mode_lasttoken, pooling_mode_mean_tokens: is not served",
        ),
        (
            {"1_Pooling/config.json": pooling(pooling_mode_lasttoken=True, word_embedding_dimension=65)},
            "word_embedding_dimension: is not the model's hidden_size 64",
        ),
        ({"1_Pooling/config.json": pooling(pooling_mode_lasttoken=True, include_prompt=False)}, "include_prompt"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case: true is not served"),
        ({"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length"),
    ],
)
def test_what_is_not_served_is_named(changed: dict[str, object], text: str) -> None:
    files = {
        "modules.json": modules("Transformer", "Pooling"),
        "1_Pooling/config.json": pooling(pooling_mode_lasttoken=True),
    }
    assert re.search(text, read({**files, **changed}).refusal)


def test_tensors_of_a_model_that_was_saved_without_its_head_are_found() -> None:
    stored = Stored((1,), lambda _: torch.zeros(1))
    body = {"embed_tokens.weight": stored, "layers.0.mlp.up_proj.weight": stored, "norm.weight": stored}
    assert whole(body) == {f"model.{name}": stored for name in body}
    assert whole(whole(body)) == whole(body)
    assert whole({**body, "lm_head.weight": stored}) == {**whole(body), "lm_head.weight": stored}


def test_gguf_files_say_their_pooling() -> None:
    assert of_gguf(None) == of_gguf(0) == of_gguf(3) == GENERATING
    assert of_gguf(1) == Embedding(Pooling("mean", normalizes=True))
    assert "pooling_type: 2 is not served" in of_gguf(2).refusal
