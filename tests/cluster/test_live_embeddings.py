"""Vectors of texts through live routers and workers, by OpenAI's own client: those of transformers, in float32."""

import json
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from live_cluster import LiveCluster, all_ready, is_idle, live_cluster
from model_zoo import VOCAB, load_oracle, write_model
from transformers import PreTrainedModel

pytestmark = pytest.mark.slow

CHUNK = 128
FLAGS = ("--dtype", "float32", "--page-size", "16", "--max-num-batched-tokens", str(CHUNK), "--max-model-len", "1024")
LENGTHS = (1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 900)
SAME = 0.99999  # cosine


def texts(count: int, seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(lengths[place % len(lengths)])] for place in range(count)]


@torch.inference_mode()
def states(oracle: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the final hidden states behind the last norm."""
    return oracle.model(torch.tensor([list(token_ids)])).last_hidden_state[0]


def cosine(ours: Sequence[float], theirs: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(torch.tensor(ours), theirs, dim=0))


def of_mean(folder: Path) -> Path:
    """Let a model's files say that its vectors are means, of any length."""
    kinds = {"": "sentence_transformers.models.Transformer", "1_Pooling": "sentence_transformers.models.Pooling"}
    modules = [{"idx": i, "name": str(i), "path": path, "type": kinds[path]} for i, path in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


def client_of(cluster: LiveCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> PreTrainedModel:
    return load_oracle(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with live_cluster(folder, model, *FLAGS, "--prefill", "2", "--decode", "1") as cluster:
        yield cluster
        cluster.wait_for(is_idle, 20)


@pytest.fixture(scope="module")
def client(cluster: LiveCluster) -> Iterator[openai.OpenAI]:
    with client_of(cluster) as client:
        yield client


def test_last_tokens_give_the_vectors_of_transformers(client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    asked = texts(40)
    given = {
        form: client.embeddings.create(model="", input=asked, encoding_format=form) for form in ("float", "base64")
    }
    assert [each.index for each in given["float"].data] == list(range(40))
    for tokens, ours, coded in zip(asked, given["float"].data, given["base64"].data, strict=True):
        assert cosine(ours.embedding, states(oracle, tokens)[-1]) >= SAME, len(tokens)
        assert np.linalg.norm(ours.embedding) == pytest.approx(1, abs=1e-6)
        decoded = np.frombuffer(__import__("base64").b64decode(coded.embedding), "<f4")
        assert np.allclose(decoded, ours.embedding, atol=2e-6)
    assert given["float"].usage.prompt_tokens == given["float"].usage.total_tokens == sum(map(len, asked))
