"""Workers of two ranks, or pipeline stages, answer as transformers does. A rank and its worker end together."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import moving
import psutil
import pytest
from live_cluster import LiveCluster, all_ready, greedy, is_idle, live_cluster, load_of
from model_zoo import assert_right, load_oracle, prompt, write_model
from transformers import PreTrainedModel

MANY = 600  # tokens, of an answer that goes on while a rank is ended
LENGTHS = (1, 16, 40, 130, 300)
BY = (
    ("llama3", "tp", "shared"),
    ("llama3", "pp", "shared"),
    *((family, "tp", memory) for family in ("qwen3.5", "lfm2", "falcon-h1") for memory in ("shared", "own")),
    ("granite-hybrid", "tp", "shared"),
)
Shape = tuple[str, str, str]  # family, what divides the model, memory of ranks
FLOAT32 = ("--dtype", "float32", "--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "500")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module", params=BY, ids=", ".join)
def shape(request: pytest.FixtureRequest) -> Shape:
    shape: Shape = request.param
    return shape


@pytest.fixture(scope="module")
def model(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(shape[0], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> PreTrainedModel:
    return load_oracle(model)


@pytest.fixture(scope="module")
def cluster(shape: Shape, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("ranks")
    sizes = (f"--prefill-{shape[1]}", "2", f"--decode-{shape[1]}", "2", "--rank-memory", shape[2])
    with live_cluster(folder, model, "--decode", "2", *sizes, *FLOAT32) as running:
        yield running


def assert_greedy(cluster: LiveCluster, oracle: PreTrainedModel) -> None:
    asked = [prompt(length, length) for length in LENGTHS]
    answers = cluster.generate_all([greedy(each, 24) for each in asked])
    for each, answer in zip(asked, answers, strict=True):
        assert_right(oracle, each, answer.tokens[0], 24)
        assert answer.ledger.handoff_bytes > 0
    cluster.wait_for(is_idle, 5)


def ranks_of(cluster: LiveCluster, name: str) -> list[psutil.Process]:
    return [
        each for each in psutil.Process(cluster.pid_of(name)).children() if "pdserve.executor.rank" in each.cmdline()
    ]


def test_pairs_of_two_ranks_each_answer_as_transformers_does(cluster: LiveCluster, oracle: PreTrainedModel) -> None:
    assert [len(ranks_of(cluster, name)) for name in ("prefill-0", "decode-0", "decode-1")] == [1, 1, 1]
    assert_greedy(cluster, oracle)


def test_when_a_rank_ends_its_worker_ends_and_its_requests_are_placed_again(
    cluster: LiveCluster, oracle: PreTrainedModel
) -> None:
    asked = prompt(60, "killed")
    call = cluster.start(greedy(asked, MANY))
    tokens = [token for _ in range(5) for delta in next(call).deltas for token in delta.token_ids]
    decoding = ("decode-0", "decode-1")
    status = cluster.wait_for(lambda status: any(load_of(status, name).num_running for name in decoding), 5)
    (name,) = [name for name in decoding if load_of(status, name).num_running]
    before = cluster.pid_of(name)
    (rank,) = ranks_of(cluster, name)
    os.kill(rank.pid, signal.SIGKILL)
    for reply in call:
        tokens += [token for delta in reply.deltas for token in delta.token_ids]
    assert_right(oracle, asked, tokens, MANY)
    assert not psutil.pid_exists(before)


def test_a_rank_that_is_frozen_in_an_answer_goes_on_with_it(cluster: LiveCluster, oracle: PreTrainedModel) -> None:
    asked = prompt(60, "frozen")
    cluster.wait_for(all_ready(3), 30)
    frozen = [rank for name in ("decode-0", "decode-1") for rank in ranks_of(cluster, name)]
    call = cluster.start(greedy(asked, MANY))
    tokens = [token for _ in range(5) for delta in next(call).deltas for token in delta.token_ids]
    for rank in frozen:
        rank.suspend()
    try:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(
                lambda: [token for reply in call for delta in reply.deltas for token in delta.token_ids]
            )
            with pytest.raises(TimeoutError):
                answer.result(1.0)
            for rank in frozen:
                rank.resume()
            tokens += answer.result(60)
    finally:
        for rank in frozen:
            rank.resume()
    assert_right(oracle, asked, tokens, MANY)


@pytest.mark.parametrize("is_ended", [False, True])
def test_prompts_that_meet_a_frozen_rank_are_answered_once_it_goes_on_or_ends(
    cluster: LiveCluster, oracle: PreTrainedModel, is_ended: bool
) -> None:
    asked = [prompt(250, f"{number} {is_ended}") for number in range(8)]
    cluster.wait_for(all_ready(3), 30)
    (rank,) = ranks_of(cluster, "prefill-0")
    rank.suspend()
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = [threads.submit(cluster.generate, greedy(each, 40)) for each in asked]
        assert not wait(answers, 1.0).done
        rank.kill() if is_ended else rank.resume()
        found = [answer.result() for answer in answers]
    for each, answer in zip(asked, found, strict=True):
        assert_right(oracle, each, answer.tokens[0], 40)
    cluster.wait_for(is_idle, 5)


def test_a_rank_ends_with_its_worker(cluster: LiveCluster) -> None:
    (rank,) = ranks_of(cluster, "prefill-0")
    cluster.signal("prefill-0", signal.SIGKILL)
    rank.wait(5)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama3", ("--prefill-tp", "1", "--decode-tp", "2")),
        ("llama3", ("--prefill-tp", "2", "--decode-tp", "1")),
        ("llama3", ("--prefill-tp", "4", "--decode-tp", "2")),
        ("llama3", ("--prefill-pp", "1", "--decode-pp", "2")),
        ("llama3", ("--prefill-pp", "2", "--decode-pp", "1")),
        ("llama3", ("--prefill-pp", "3", "--decode-pp", "2")),
        ("llama3", ("--prefill-pp", "2", "--decode-tp", "2")),
        ("qwen3.5", ("--prefill-tp", "1", "--decode-tp", "2")),
        ("falcon-h1", ("--prefill-tp", "2", "--decode-tp", "1")),
        ("lfm2", ("--prefill-tp", "4", "--decode-tp", "2")),
    ],
)
def test_pairs_of_other_degrees_answer_as_transformers_does(
    family: str, sizes: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_model(family, tmp_path / "model")
    with live_cluster(tmp_path, model, *sizes, *FLOAT32) as running:
        assert_greedy(running, load_oracle(model))


def test_a_running_answer_moves_between_a_worker_of_stages_and_one_of_a_single_rank(tmp_path: Path) -> None:
    moving.assert_an_answer_moves(tmp_path, {"decode-0": {"pipeline_parallel_size": 2}})
