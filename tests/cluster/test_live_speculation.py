"""Workers that guess give the tokens of one engine that does not, though they are killed or their answers move."""

import json
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import moving
import pytest
import torch
from eagle3_heads import longest_walks, write_forgetful_model, write_head_that_looks_back
from live_cluster import Answer, LiveCluster, all_ready, is_idle, live_cluster, load_of
from model_zoo import prompt, write_model
from mtp_modules import write_model_with_a_module_that_is_often_right
from safetensors.torch import load_file
from scraping import scrape

from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.offline import LoneEngine
from pdserve.model.loading import load_model
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
DECODES = ("decode-0", "decode-1")
COUNT, NUM_TOKENS, NUM_BEFORE = 6, 120, 12
SAMPLINGS: tuple[dict[str, Any], ...] = (  # beside few allowed tokens, so that answers repeat themselves
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.1},
    {"temperature": 0.4, "n": 2},
)
FLAGS = (
    "--decode",
    "2",
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--max-model-len",
    "1000",
    "--test-step-s",
    "0.04",
)


def sampling_of(number: int) -> dict[str, Any]:
    own = SAMPLINGS[number % len(SAMPLINGS)]
    few = tuple(range(9 + number, 12 + number))
    return {**own, "seed": number, "max_tokens": NUM_TOKENS, "ignore_eos": True, "allowed_token_ids": few}


Asked = tuple[list[int], dict[str, Any]]  # a prompt, and how its answer is sampled
ASKED: list[Asked] = [(prompt(30 + 7 * number, seed=number % 5) * 2, sampling_of(number)) for number in range(COUNT)]


OTHERS = (
    *("ngram", "suffix", "suffix, two ranks", "draft_model", "mtp", "eagle3, two ranks", "mtp, two ranks"),
    *("ngram, own memory", "draft_model, own memory", "eagle3, own memory of one rank"),
    *("ngram, states", "draft_model, states", "mtp, states", "ngram, two ranks, states", "mtp, two ranks, states"),
)
SIZES = {
    "two ranks": ("--decode-tp", "2"),
    "own memory": ("--decode-tp", "2", "--rank-memory", "own"),
    "own memory of one rank": ("--rank-memory", "own"),
    "states": (),
}
LONG = [pytest.param(each, marks=pytest.mark.long) for each in OTHERS]


@pytest.fixture(scope="module", params=["eagle3", *LONG])
def method(request: pytest.FixtureRequest) -> str:
    method: str = request.param
    return method


@pytest.fixture(scope="module")
def model(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model. For a head, its tokens depend on the last one alone, so that a head can be right."""
    folder = tmp_path_factory.mktemp("model")
    if method.startswith("eagle3"):
        write_forgetful_model(folder)
        return folder
    if method.startswith("mtp"):
        family = "qwen3.5" if method.endswith("states") else "deepseek-v3"
        return write_model_with_a_module_that_is_often_right(family, folder)
    return write_model("lfm2" if method.endswith("states") else "llama3", folder)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[int, list[int]]]:
    checkpoint = open_directory(model)
    loaded = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    engine = LoneEngine(loaded, (), 1000)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other in every layer while somebody else keeps a core busy
    answers = [engine.answer(token_ids, SamplingParams(**sampling)) for token_ids, sampling in ASKED]
    torch.set_num_threads(num_threads)
    return [{index: list(tokens) for index, tokens in answer.items()} for answer in answers]


@pytest.fixture(scope="module")
def cluster(method: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    own: dict[str, object] = {"prompt_lookup_min": 1} if method.startswith("ngram") else {}
    if method.startswith("draft_model"):
        own = {"model": str(write_model("llama3", tmp_path_factory.mktemp("draft")))}  # the same one, or of its tokens
    elif method.startswith("eagle3"):
        head = tmp_path_factory.mktemp("head")
        own = {"model": str(write_head_that_looks_back(head, model, load_file(model / WEIGHTS)))}
    name, *ranks = method.split(", ")
    sizes = [flag for each in ranks for flag in SIZES[each]]
    guessing = ("--speculative-config", json.dumps({"method": name, **own}), *sizes)
    with live_cluster(tmp_path_factory.mktemp("cluster"), model, *FLAGS, *guessing) as running:
        yield running
        running.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 60)


class Streams:
    """All answers, under way together."""

    def __init__(self, cluster: LiveCluster, asked: Sequence[Asked] = ASKED) -> None:
        self._pool = ThreadPoolExecutor(COUNT)
        requests = [
            inference.GenerateRequest(
                token_ids=inference.TokenIds(ids=token_ids), sampling=inference.SamplingParams(**sampling)
            )
            for token_ids, sampling in asked
        ]
        self._calls = [cluster.start(request) for request in requests]
        self.answers = list(self._pool.map(self._begin, self._calls))

    @staticmethod
    def _begin(call: Iterator[inference.GenerateResponse]) -> Answer:
        answer = Answer()
        while len(answer.tokens.get(0, [])) < NUM_BEFORE:
            answer.add(next(call))
        return answer

    def check(self, expected: Sequence[dict[int, list[int]]]) -> None:
        list(self._pool.map(Answer.read, self.answers, self._calls))
        self._pool.shutdown()
        assert [answer.tokens for answer in self.answers] == list(expected)


def counted(cluster: LiveCluster, name: str, names: Sequence[str]) -> float:
    addresses = [each.metrics_address for each in cluster.state.processes if each.name in (names or DECODES)]
    return sum(scrape(address).total(f"vllm:spec_decode_num_{name}_total") for address in addresses)


def accepted(cluster: LiveCluster, *names: str) -> float:
    """Return how many guesses of some or all decode workers were right."""
    return counted(cluster, "accepted_tokens_per_pos", names)


def guessed(cluster: LiveCluster) -> float:
    return counted(cluster, "draft_tokens", ())


def in_ledgers(streams: Streams) -> tuple[int, int]:
    """Return how many guesses of these answers were right, and how many were verified."""
    told = [drafts for answer in streams.answers for drafts in answer.ledger.drafts.values()]
    return sum(sum(each.num_accepted_tokens_per_pos) for each in told), sum(each.num_draft_tokens for each in told)


Answered = dict[int, list[int]]  # tokens by the number of the choice


def counts_of(cluster: LiveCluster, asked: Sequence[Asked], expected: Sequence[Answered]) -> tuple[float, float]:
    """Return how many guesses of these answers were right, and how many were verified."""
    before = accepted(cluster), guessed(cluster)
    streams = Streams(cluster, asked)
    streams.check(expected)
    counts = accepted(cluster) - before[0], guessed(cluster) - before[1]
    assert in_ledgers(streams) == counts
    return counts


def busiest(cluster: LiveCluster) -> str:
    status = cluster.status()
    return max(DECODES, key=lambda name: load_of(status, name).num_running)


@pytest.mark.long
@pytest.mark.parametrize("method", ["draft_model"], indirect=True)
def test_a_draft_model_knows_prompts_that_other_workers_computed(
    cluster: LiveCluster, expected: list[dict[int, list[int]]]
) -> None:
    num_right, num_guessed = counts_of(cluster, ASKED, expected)
    assert num_right > 0.95 * num_guessed > 0, "it is the same model"


@pytest.mark.parametrize("method", ["eagle3", pytest.param("eagle3, two ranks", marks=pytest.mark.long)], indirect=True)
def test_kv_of_a_head_crosses_with_prompts_that_other_workers_computed(cluster: LiveCluster, model: Path) -> None:
    """The head guesses what followed the same token before, and only the prompt has that."""
    walks = longest_walks(load_file(model / WEIGHTS), COUNT)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    asked: list[Asked] = [([*walk * 2, walk[0]], {**greedy, "max_tokens": len(walk) - 1}) for walk in walks]
    num_right, num_guessed = counts_of(cluster, asked, [{0: walk[1:]} for walk in walks])
    assert num_right > 0.95 * num_guessed > 0, "where guesses were often wrong before, few are made: so it is the first"


@pytest.mark.long
def test_answers_are_those_of_one_engine_without_guesses(
    cluster: LiveCluster, expected: list[dict[int, list[int]]]
) -> None:
    counts_of(cluster, ASKED, expected)
    assert accepted(cluster) > 0, "in this test or in the one before: a worker that others slow down guesses less"


@pytest.mark.long
def test_answers_that_move_stay_the_same(cluster: LiveCluster, expected: list[dict[int, list[int]]]) -> None:
    for _ in range(moving.MAX_ROUNDS):  # an answer may end, or outgrow what was granted for it, before it can move
        before = accepted(cluster)
        streams = Streams(cluster)
        source = busiest(cluster)
        moving.move(cluster, source, *(set(DECODES) - {source}))
        streams.check(expected)
        if accepted(cluster) > before and any(answer.ledger.moves for answer in streams.answers):
            return
    pytest.fail("no answer has moved, or no guess was right")


@pytest.mark.long
def test_answers_whose_worker_is_killed_stay_the_same(
    cluster: LiveCluster, expected: list[dict[int, list[int]]]
) -> None:
    streams = Streams(cluster)
    victim = busiest(cluster)
    (survivor,) = set(DECODES) - {victim}
    cluster.signal(victim, signal.SIGKILL)
    streams.check(expected)
    assert accepted(cluster, survivor) > 0, "in this test or in one before: a worker that is slowed down stops guessing"
    assert any(answer.ledger.attempts > 1 for answer in streams.answers)
