"""Two hundred answers of all kinds are those without guesses, whatever guesses, through moves and a lost worker."""

import json
import logging
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import moving
import pytest
from eagle3_heads import write_forgetful_model, write_head_that_looks_back
from live_cluster import Answer, LiveCluster, all_ready, is_idle, live_cluster, load_of
from model_zoo import prompt
from safetensors.torch import load_file

from pdserve.proto.v1 import inference_pb2 as inference

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.slow, pytest.mark.long]

COUNT, AT_ONCE, NUM_TOKENS = 200, 24, 100
DECODES = ("decode-0", "decode-1")
SAME_LOGPROB = 1e-5
FLAGS = ("--decode", "2", "--dtype", "float32", "--max-model-len", "1000", "--test-step-s", "0.05")
NUMBERS = {"type": "array", "items": {"enum": [1, 12, 123]}, "minItems": 12, "maxItems": 16}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.6, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.2},
    {"temperature": 0.8, "structured_output": inference.StructuredOutput(json_schema=json.dumps(NUMBERS))},
    {"temperature": 0.5, "n": 2},
    {"temperature": 0.4},
)
STOPPED = len(KINDS) - 1  # the kind that has a stop string


def request_of(number: int, *stop: str) -> inference.GenerateRequest:
    """Return a request, with few allowed tokens where nothing else lets answers repeat themselves."""
    kind = KINDS[number % len(KINDS)]
    is_free = kind["temperature"] == 0 or "structured_output" in kind
    few = () if is_free else tuple(range(32 + number % 90, 35 + number % 90))
    terms = {"seed": number, "max_tokens": NUM_TOKENS, "logprobs": 2, "allowed_token_ids": few}
    sampling = inference.SamplingParams(**terms, ignore_eos="structured_output" not in kind, **kind)
    token_ids = inference.TokenIds(ids=prompt(20 + 7 * number % 90, seed=number) * 2)
    return inference.GenerateRequest(token_ids=token_ids, sampling=sampling, stop=stop)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_forgetful_model(folder, remembered=0.1)
    return folder


class Stream:
    """All answers, so many under way at a time."""

    def __init__(self, cluster: LiveCluster, requests: Sequence[inference.GenerateRequest]) -> None:
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self.answers = [self._pool.submit(cluster.generate, request) for request in requests]

    def await_share(self, share: float) -> None:
        """Return once so much of the answers is here."""
        left: set[Future[Answer]] = set(self.answers)
        while len(left) > (1 - share) * len(self.answers):
            left = wait(left, return_when=FIRST_COMPLETED).not_done

    def end(self) -> list[Answer]:
        answers = [answer.result() for answer in self.answers]
        self._pool.shutdown()
        return answers


def busiest(cluster: LiveCluster) -> tuple[str, str]:
    """Return the decode worker that has most to do, and the other one."""
    status = cluster.status()
    first, second = sorted(DECODES, key=lambda name: load_of(status, name).num_running)
    return second, first


@pytest.fixture(scope="module")
def plain(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Answer], list[inference.GenerateRequest]]:
    """Return what is answered without guesses, and the requests: stop strings are parts of what answers would be."""
    requests = [request_of(number) for number in range(COUNT)]
    with live_cluster(tmp_path_factory.mktemp("plain"), model, *FLAGS) as cluster:
        stopped = range(STOPPED, COUNT, len(KINDS))
        whole = Stream(cluster, [requests[number] for number in stopped]).end()
        for number, answer in zip(stopped, whole, strict=True):
            requests[number] = request_of(number, answer.text[0][30 + number % 40 :][:3])
        answers = Stream(cluster, requests).end()
    assert any(len(answers[number].tokens[0]) < NUM_TOKENS for number in stopped)
    return answers, requests


def difference(one: Answer, other: Answer) -> float:
    """Return how far log probabilities of the same tokens are apart, at most."""
    assert (one.tokens, one.text, one.finish) == (other.tokens, other.text, other.finish)
    pairs = [pair for index in one.logprobs for pair in zip(one.logprobs[index], other.logprobs[index], strict=True)]
    return max(abs(each.chosen - same.chosen) for each, same in pairs)


def settings(method: str, folder: Path, model: Path) -> dict[str, object]:
    if method == "draft_model":
        return {"model": str(model)}
    if method == "eagle3":
        return {"model": str(write_head_that_looks_back(folder, model, load_file(model / "model.safetensors")))}
    return {}


@pytest.mark.parametrize("method", ["", "ngram", "suffix", "draft_model", "eagle3"])
def test_answers_of_all_kinds_are_those_without_guesses(
    method: str,
    model: Path,
    plain: tuple[list[Answer], list[inference.GenerateRequest]],
    tmp_path: Path,
) -> None:
    expected, requests = plain
    own = {"method": method, **settings(method, tmp_path / "head", model)}
    guessing = ("--speculative-config", json.dumps(own)) if method else ()
    with live_cluster(tmp_path, model, *FLAGS, *guessing) as cluster:
        stream = Stream(cluster, requests)
        for share in (0.2, 0.3, 0.4):
            stream.await_share(share)
            moving.move(cluster, *busiest(cluster))
        stream.await_share(0.6)
        cluster.signal(busiest(cluster)[0], signal.SIGKILL)
        answers = stream.end()
        cluster.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 60)
    figures = {
        "apart": max(map(difference, answers, expected)),
        "moved": sum(len(answer.ledger.moves) for answer in answers),
        "placed again": sum(answer.ledger.attempts > 1 for answer in answers),
        "tokens": sum(len(tokens) for answer in answers for tokens in answer.tokens.values()),
        "guesses": sum(told.num_draft_tokens for answer in answers for told in answer.ledger.drafts.values()),
        "right": sum(
            sum(told.num_accepted_tokens_per_pos) for answer in answers for told in answer.ledger.drafts.values()
        ),
    }
    logger.info("%s: %s", method or "no guesses", figures)  # seen with --log-cli-level=INFO
    assert figures["apart"] < SAME_LOGPROB
    assert min(figures["moved"], figures["placed again"]) > 0
    assert bool(method) == (figures["right"] > 100)
