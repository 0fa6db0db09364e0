"""Workers with K and V in a byte a value hand pages off, find them again and move answers, and answer as one engine."""

from collections.abc import Iterator
from pathlib import Path

import moving
import pytest
import torch
from greedy_runs import BEST_TWO, continued
from live_cluster import all_ready, greedy, is_idle, live_cluster
from model_zoo import UNEVEN, prompt, write_model
from moving import MOVED_WITHIN_S, POOLS, WORKER_FLAGS, Running, num_moved
from unlike_engines import UnlikeEngines
from wired_cluster import WiredCluster, wired_cluster

from pdserve.checkpoint.hf_directory import open_directory
from pdserve.engine.offline import LoneEngine
from pdserve.engine.runner import Runner
from pdserve.model.loading import load_model
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
TIED_ANYWHERE = 5e-2  # what ranks change of the lead of a token, over all families
TWO_RANKS = ("--decode-tp", "2", "--rank-memory", "own")
MOVED = 250  # tokens of an answer that moves to other ranks
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "1000")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("model"))


def expected(model: Path, code: KvCode | None, asked: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the answer of one engine."""
    checkpoint = open_directory(model)
    engine = LoneEngine(load_model(checkpoint.config, checkpoint.weights(), torch.float32), (), 1000, code)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    assert not engine.is_tied(asked, params), "the test needs another prompt"
    return list(engine.answer(asked, params)[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "ranks"),
    [
        ("int8", ""),
        ("fp8_e4m3", ""),
        ("int8", "--decode-tp 2"),
        ("fp8_e4m3", "--prefill-tp 2"),
        ("int8", "--prefill-tp 2 --decode-tp 2"),
        ("fp8_e4m3", "--prefill-tp 2 --decode-tp 4"),
        ("fp8_e4m3", "--prefill-pp 2 --decode-tp 2"),
        ("int8", "--decode-pp 2"),
        ("fp8_e4m3", "--rank-memory own"),
        ("int8", "--rank-memory own --decode-tp 2"),
        ("fp8_e4m3", "--rank-memory own --prefill-tp 2"),
        ("fp8_e4m3", "--rank-memory own --prefill-tp 2 --decode-tp 4"),
        ("int8", "--rank-memory own --prefill-pp 2 --decode-tp 2"),
    ],
)
def test_a_handed_off_answer_is_that_of_one_engine(tmp_path: Path, model: Path, code: KvCode, ranks: str) -> None:
    prompts = [prompt(length) for length in (152, 29, 301)]
    with live_cluster(tmp_path, model, *FLAGS, "--kv-cache-dtype", code, *ranks.split()) as cluster:
        answers = [cluster.generate(greedy(asked, NUM_TOKENS)) for asked in (*prompts, prompts[0])]
        status = cluster.wait_for(lambda status: all_ready(2)(status) and is_idle(status), 60)
    assert [answer.tokens[0] for answer in answers[:3]] == [expected(model, code, asked) for asked in prompts]
    assert answers[3].tokens == answers[0].tokens
    assert answers[3].usage.cached_tokens >= 144
    assert {worker.registration.layout.dtype for worker in status.workers} == {code}
    assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0]
    pages = -(-152 // 16)
    assert answers[0].ledger.handoff_bytes == pages * 3 * 2 * 2 * 16 * (16 + 4)  # a row: 16 codes and a scale


@pytest.mark.long
@pytest.mark.parametrize(("code", "ranks"), [("int8", ()), ("fp8_e4m3", ()), ("int8", TWO_RANKS)])
def test_engines_of_gpus_hand_over_coded_pages(
    tmp_path: Path, model: Path, code: KvCode, ranks: tuple[str, ...]
) -> None:
    """Triton's interpreter computes: a step takes seconds."""
    asked, count = prompt(45), 6
    few = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128", "--num-pages", "64")
    flags = ("--dtype", "float32", "--num-threads", "1", *few, "--device", "interpreter", *ranks)
    with live_cluster(tmp_path, model, *flags, "--kv-cache-dtype", code) as cluster:
        answers = [cluster.generate(greedy(asked, count)) for _ in range(2)]
        status = cluster.wait_for(lambda status: all_ready(2)(status) and is_idle(status), 60)
    assert [answer.tokens[0] for answer in answers] == [expected(model, code, asked, count)] * 2
    assert answers[1].usage.cached_tokens >= 32
    assert {worker.registration.layout.dtype for worker in status.workers} == {code}
    assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize(
    ("code", "ranks"),
    [
        ("fp8_e4m3", "--decode-tp 2"),
        ("int8", "--rank-memory own --decode-tp 2"),
        ("fp8_e4m3", "--rank-memory own --prefill-tp 2"),
    ],
)
def test_windows_in_pages_of_their_own_are_handed_off_with_coded_rows(
    tmp_path: Path, family: str, code: KvCode, ranks: str
) -> None:
    folder = write_model(family, tmp_path / "model", **(UNEVEN if family == "gemma3" else {}))
    checkpoint, asked = open_directory(folder), [prompt(length) for length in (40, 150, 300)]
    loaded = load_model(checkpoint.config, checkpoint.weights(), torch.float32)
    right = continued(Runner(loaded, 200, 16, code=code), asked, 10, 100, BEST_TWO)
    with live_cluster(tmp_path, folder, *FLAGS, "--kv-cache-dtype", code, *ranks.split()) as cluster:
        answers = cluster.generate_all([greedy(each, 10) for each in asked])
        status = cluster.wait_for(lambda status: all_ready(2)(status) and is_idle(status), 60)
    counts = [each.num_sure(TIED_ANYWHERE) for each in right]
    assert sum(counts) > 10, "the test needs other prompts"
    for answer, due, count in zip(answers, right, counts, strict=True):
        assert answer.tokens[0][:count] == due.answer[:count]
        assert answer.ledger.handoff_bytes > 0
    assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("large"), **moving.MODEL_SHAPE)


@pytest.fixture(scope="module", params=["int8", "fp8_e4m3"])
def moved_cluster(
    request: pytest.FixtureRequest, large: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WiredCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    flags = {**WORKER_FLAGS, "kv_cache_dtype": request.param}
    with wired_cluster(folder, large, POOLS, flags) as cluster:
        cluster.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 60)
        cluster.introduce()
        moving.introduce(cluster)
        yield cluster
        status = cluster.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 60)
        assert [worker.load.pages_leaked for worker in status.workers] == [0] * 3


@pytest.mark.long
def test_a_moved_answer_goes_on_over_the_same_rows(moved_cluster: WiredCluster) -> None:
    asked = greedy(prompt(150), 700)
    unmoved = moved_cluster.generate(asked)
    running = Running.of(moved_cluster, asked)
    assert running.move() == 1
    moved_cluster.wait_for(lambda status: num_moved(status) == num_moved(running.before) + 1, MOVED_WITHIN_S)
    moved = running.end()
    assert moved.tokens == unmoved.tokens
    assert moved.ledger.decode_worker == running.target


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "by", "memory"),
    [
        ("int8", "tensor_parallel_size", "shared"),
        ("fp8_e4m3", "pipeline_parallel_size", "shared"),
        ("fp8_e4m3", "tensor_parallel_size", "own"),
    ],
)
def test_an_answer_moves_between_one_and_two_ranks_with_the_same_rows(
    tmp_path: Path, large: Path, code: KvCode, by: str, memory: str
) -> None:
    flags, own = {**WORKER_FLAGS, "kv_cache_dtype": code, "rank_memory": memory}, {"decode-1": {by: 2}}
    engines = UnlikeEngines(large, (code, code))
    asked, _ = engines.untied(150, MOVED)
    with wired_cluster(tmp_path, large, POOLS, flags, own_flags=own) as cluster:
        cluster.introduce()
        moving.introduce(cluster)
        running = Running.of(cluster, greedy(asked, MOVED))
        assert running.move() == 1
        cluster.wait_for(lambda status: num_moved(status) > num_moved(running.before), MOVED_WITHIN_S)
        moved = running.end()
        status = cluster.wait_for(is_idle, 60)
    assert moved.ledger.decode_worker == running.target
    assert moved.tokens[0] == engines.answer(asked, MOVED)
    assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0, 0]
