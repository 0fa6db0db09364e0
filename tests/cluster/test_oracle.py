"""Two prefill and two decode workers give what transformers gives, and what one engine gives."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_cluster import LiveCluster, greedy, is_idle, live_cluster
from model_zoo import FAMILIES, STATES, VOCAB, WITH_EXPERTS, first_disagreement, load_oracle, write_model
from one_engine import OneEngine
from transformers import PreTrainedModel

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.sampling import SamplingParams

PAGE_SIZE = 16
CHUNK = 128
NUM_TOKENS = 64
FLOAT32 = ("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--max-num-batched-tokens", str(CHUNK))
ALWAYS = ("gemma3",)  # layers with a window and without; `tests/model` has every family
WITH_WINDOWS = (
    *("cohere2", "exaone4", "gemma2", "gemma3", "gemma4", "gemma4-shared", "ministral", "olmo3"),
    "qwen2-windows",
)
LENGTHS = (1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 31, 32, 33, CHUNK - 1, CHUNK, CHUNK + 1, 300)


def prompts(vocab_size: int, longest: int, *, of_each: int = 3, num_sharing: int = 26) -> list[list[int]]:
    """Return prompts: two long ones, some of each length at borders of pages and chunks, some that share beginnings."""
    rng = random.Random(5)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    long = text(longest)
    shared = text(90)
    family = [shared[: rng.randrange(10, 90)] + text(rng.randrange(1, 40)) for _ in range(num_sharing)]
    return [long, [*long[:-5], *text(3)], *(text(length) for length in LENGTHS for _ in range(of_each)), *family]


def assert_greedy(cluster: LiveCluster, oracle: PreTrainedModel, asked: list[list[int]], num_tokens: int) -> None:
    answers = cluster.generate_all([greedy(prompt, num_tokens) for prompt in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.tokens[0]) == num_tokens
        wrong = first_disagreement(oracle, prompt, answer.tokens[0])
        assert wrong is None, f"prompt of {len(prompt)}: token {wrong} is not the oracle's"
        assert answer.ledger.attempts <= 2, "on busy cores, workers may meet later than they wait for each other"
        assert answer.ledger.handoff_bytes > 0
    workers = {(a.ledger.prefill_worker, a.ledger.decode_worker) for a in answers}
    assert {p for p, _ in workers} == {"prefill-0", "prefill-1"}
    assert {d for _, d in workers} == {"decode-0", "decode-1"}
    cluster.wait_for(is_idle, 5)
    status = cluster.wait_for(lambda status: sum(len(worker.pairs) for worker in status.workers) == len(workers), 5)
    assert {pair.carrier for worker in status.workers for pair in worker.pairs} == {"not tcp"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "is_short"),
    [(name, True) for name in ALWAYS]
    + [(name, False) for name in dict.fromkeys((*FAMILIES, *WITH_WINDOWS, *WITH_EXPERTS, *STATES))],
)
def test_each_family_in_float32_answers_as_transformers_does(family: str, *, is_short: bool, tmp_path: Path) -> None:
    model = write_model(family, tmp_path / family)
    asked = prompts(VOCAB, 700, of_each=1, num_sharing=8) if is_short else prompts(VOCAB, 2000)
    with live_cluster(tmp_path, model, "--prefill", "2", "--decode", "2", *FLOAT32) as cluster:
        assert_greedy(cluster, load_oracle(model), asked, NUM_TOKENS)


@pytest.fixture(scope="module")
def pair(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """One prefill and one decode worker in bf16, with weights and seats of their own."""
    folder = tmp_path_factory.mktemp("pair")
    flags = ("--page-size", str(PAGE_SIZE), "--max-num-batched-tokens", str(CHUNK))
    own = ("--shared-weights-dir", str(folder / "weights"))
    with live_cluster(folder, smollm2, *flags, *own, has_seats=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[OneEngine]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other in every layer while somebody else keeps a core busy
    yield OneEngine(smollm2, torch.bfloat16, PAGE_SIZE, CHUNK)
    torch.set_num_threads(num_threads)


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 40000) for _ in range(length)]


@pytest.mark.long
@pytest.mark.parametrize("length", [1, PAGE_SIZE, CHUNK, PAGE_SIZE + 1, 3 * CHUNK + 5])
def test_in_bfloat16_two_workers_answer_as_one_engine_does(pair: LiveCluster, engine: OneEngine, length: int) -> None:
    prompt = random_prompt(length, length)
    answer = pair.generate(greedy(prompt, 24))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert answer.tokens[0] == [token.token_id for token in engine.generate(prompt, params)[0]]


SAMPLINGS = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "penalized": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "logprobs": {"temperature": 0.7, "logprobs": 5, "min_tokens": 30},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_seed_gives_the_same_tokens_through_two_workers_and_through_one_engine(
    pair: LiveCluster, engine: OneEngine, name: str
) -> None:
    sampling = {**SAMPLINGS[name], "seed": 1234, "max_tokens": 40}
    prompt = random_prompt(
        50, 100 + list(SAMPLINGS).index(name)
    )  # its own: a cached prefix would change how bfloat16 rounds
    answer = pair.generate(
        inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt), sampling=inference.SamplingParams(**sampling)
        )
    )
    expected = engine.generate(prompt, SamplingParams(**sampling))[0]
    assert answer.tokens[0] == [token.token_id for token in expected]
    for theirs, ours in zip(answer.logprobs[0], expected, strict=name == "logprobs"):
        assert ours.logprobs is not None
        assert theirs.chosen == pytest.approx(ours.logprobs.chosen, abs=1e-5)
        assert [top.token_id for top in theirs.top] == [token_id for token_id, _ in ours.logprobs.top]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or "OMP_NUM_THREADS" in os.environ, reason="threads are not bound")
def test_threads_of_both_workers_are_bound_from_their_seats_on(pair: LiveCluster) -> None:
    for name in ("prefill-0", "decode-0"):
        log = (pair.state.secret_file.parent / "logs" / f"{name}.log").read_text()
        assert "beside other workers it computes from processor" in log


def test_four_continuations_cost_one_prefill_and_one_transfer(pair: LiveCluster, engine: OneEngine) -> None:
    prompt = random_prompt(100, 9)  # one chunk
    single = pair.generate(greedy(random_prompt(100, 10), 2))
    before = num_prefill_steps(pair.status())
    sampling = {"n": 4, "seed": 77, "max_tokens": 24, "ignore_eos": True}
    answer = pair.generate(
        inference.GenerateRequest(
            token_ids=inference.TokenIds(ids=prompt), sampling=inference.SamplingParams(**sampling)
        )
    )
    expected = engine.generate(prompt, SamplingParams(**sampling))
    assert answer.tokens == {i: [token.token_id for token in expected[i]] for i in range(4)}
    assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 4
    assert answer.usage.prompt_tokens == 100
    assert answer.usage.completion_tokens == 96
    assert answer.ledger.handoff_bytes == single.ledger.handoff_bytes
    assert num_prefill_steps(pair.status()) == before + 1


def test_a_stranger_with_reflection_alone_gets_a_streamed_answer(pair: LiveCluster) -> None:
    sampling = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}  # many more than one message brings
    request = {"text": "The capital of France is", "sampling": sampling}
    url = f"http://{pair.endpoint}/pdserve.v1.InferenceService/Generate"
    buf = Path(sys.executable).with_name("buf")
    command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request), url]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    decoder, replies = json.JSONDecoder(), []
    while output := output.lstrip():
        reply, end = decoder.raw_decode(output)
        replies.append(reply)
        output = output[end:]
    assert len(replies) > 2
    text = "".join(delta.get("text", "") for reply in replies for delta in reply.get("deltas", []))
    assert "Paris" in text
    assert replies[-1]["usage"]["completionTokens"] == 64


def num_prefill_steps(status: admin.ClusterStatus) -> int:
    """Return how many steps prefill workers have told of, each with its tokens: none of an ended request is missing."""
    return sum(costs.num_prefill_steps for costs in status.costs if costs.role == link.ROLE_PREFILL)
