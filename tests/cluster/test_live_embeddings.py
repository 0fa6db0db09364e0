"""Vectors of texts through live routers and workers, by OpenAI's own client: those of transformers, in float32."""

import base64
import json
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from live_cluster import LiveCluster, all_ready, is_idle, live_cluster
from model_zoo import VOCAB, load_oracle, write_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel

from pdserve.text.scoring import NO, WORDS, YES

pytestmark = [pytest.mark.slow, pytest.mark.long]

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


def write_vocabulary(path: Path) -> None:
    """Write a tokenizer of bytes that has the tokens of a reranker's prompt, too."""
    special = [word for word in WORDS if word not in (YES, NO)]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ye", YES, NO, *special]
    pieces += [f"word{i}" for i in range(len(pieces), VOCAB)]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path))


def client_of(cluster: LiveCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model("qwen3", tmp_path_factory.mktemp("model"))
    write_vocabulary(folder / "tokenizer.json")
    return folder


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
        decoded = np.frombuffer(base64.b64decode(str(coded.embedding)), "<f4")
        assert np.allclose(decoded, ours.embedding, atol=2e-6)
    assert given["float"].usage.prompt_tokens == given["float"].usage.total_tokens == sum(map(len, asked))


def test_means_give_the_vectors_of_transformers_though_prefixes_are_cached(
    oracle: PreTrainedModel, tmp_path: Path
) -> None:
    folder = of_mean(write_model("qwen3", tmp_path / "mean"))
    with live_cluster(tmp_path, folder, *FLAGS, *("--num-frontends", "2", "--tensor-parallel-size", "2")) as cluster:
        asked = texts(20, seed=1)
        asked += [[*tokens[:-1], 5] for tokens in asked]  # begin as others do
        with client_of(cluster) as client:
            for _ in range(2):
                given = client.embeddings.create(model="", input=asked)
                for tokens, ours in zip(asked, given.data, strict=True):
                    mean = states(oracle, tokens).mean(0)
                    assert cosine(ours.embedding, mean) >= SAME, len(tokens)
                    assert np.linalg.norm(ours.embedding) == pytest.approx(float(mean.norm()), rel=1e-4)
                assert given.usage.model_extra == {"prompt_tokens_details": {"cached_tokens": 0}}
            shorter = client.embeddings.create(model="", input=asked[:3], dimensions=8).data
            for tokens, ours in zip(asked, shorter, strict=False):
                assert cosine(ours.embedding, states(oracle, tokens).mean(0)[:8]) >= SAME
        cluster.wait_for(is_idle, 20)


def test_cached_prefixes_are_used_for_last_tokens(client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    (long,) = texts(1, seed=2, lengths=(700,))
    cached = []
    for number in range(4):
        tokens = [*long, 7 + number]
        given = client.embeddings.create(model="", input=tokens)
        assert cosine(given.data[0].embedding, states(oracle, tokens)[-1]) >= SAME
        cached.append((given.usage.model_extra or {})["prompt_tokens_details"]["cached_tokens"])
    assert sorted(cached) in ([0, 0, 688, 688], [0, 688, 688, 688]), "each of two workers computes it once at most"
    ledger = (given.model_extra or {})["pdserve"]
    assert ledger["prefill_worker"].startswith("prefill-")
    assert (ledger["decode_worker"], ledger["handoff_bytes"]) == ("", 0)


def test_shortened_vectors_have_length_1(client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    asked = texts(5, seed=3)
    for tokens, ours in zip(asked, client.embeddings.create(model="", input=asked, dimensions=16).data, strict=True):
        assert len(ours.embedding) == 16
        assert np.linalg.norm(ours.embedding) == pytest.approx(1, abs=1e-6)
        assert cosine(ours.embedding, states(oracle, tokens)[-1][:16]) >= SAME


def test_texts_and_their_tokens_are_the_same_input(client: openai.OpenAI) -> None:
    text = "Write it once, and read it often."
    alone = client.embeddings.create(model="", input=text).data[0].embedding
    listed = client.embeddings.create(model="", input=[text, "another"]).data[0].embedding
    assert np.allclose(alone, listed, atol=2e-6)


@torch.inference_mode()
def test_scores_are_those_of_the_models_card(client: openai.OpenAI, model: Path, oracle: PreTrainedModel) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task, query = "Given a web search query, retrieve relevant passages that answer the query", "Which capital?"
    documents = ["Paris is.", "A cat sat on a mat.", "Rome", "The capital of Peru is Lima. " * 5]
    expected = []
    for document in documents:
        pair = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        ids = [i for part in (prefix, pair, suffix) for i in tokenizer.encode(part, add_special_tokens=False).ids]
        logits = oracle(torch.tensor([ids])).logits[0, -1]
        words = logits[[tokenizer.token_to_id(YES), tokenizer.token_to_id(NO)]]
        expected.append(float(words.softmax(0)[0]))
    given: Any = client.post("/rerank", cast_to=object, body={"query": query, "documents": documents, "top_n": 3})
    best = sorted(range(4), key=lambda place: -expected[place])[:3]
    assert [result["index"] for result in given["results"]] == best
    assert [result["relevance_score"] for result in given["results"]] == pytest.approx(
        [expected[place] for place in best], abs=1e-5
    )
    scores: Any = client.post("/score", cast_to=object, body={"text_1": query, "text_2": documents})
    assert [each["score"] for each in scores["data"]] == pytest.approx(expected, abs=1e-5)


def test_chats_are_answered_while_texts_are_embedded(client: openai.OpenAI) -> None:
    asked = texts(400, seed=4, lengths=(100, 200, 300))
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(client.embeddings.create, model="", input=asked) for _ in range(3)]
        num_answered = 0
        while not all(load.done() for load in loads):
            answer = client.completions.create(model="", prompt=[5, 6, 7], max_tokens=4, temperature=0)
            assert answer.choices[0].finish_reason == "length"
            num_answered += not all(load.done() for load in loads)
        assert [len(load.result().data) for load in loads] == [400] * 3
    assert num_answered >= 5


def test_a_killed_worker_costs_a_retry(cluster: LiveCluster, client: openai.OpenAI, oracle: PreTrainedModel) -> None:
    asked = texts(600, seed=5, lengths=(50, 300, 600))
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(client.embeddings.create, model="", input=asked)
        cluster.wait_for(lambda status: status.num_active > 8, 20)
        cluster.signal("prefill-1", signal.SIGKILL)
        given = load.result()
    for tokens, ours in list(zip(asked, given.data, strict=True))[::13]:
        assert cosine(ours.embedding, states(oracle, tokens)[-1]) >= SAME
    status = cluster.wait_for(all_ready(3), 60)
    assert status.num_active == 0
