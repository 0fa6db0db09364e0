"""A prefill and a decode worker with unlike types of K and V answer as two engines, with rows rounded between them."""

from dataclasses import dataclass
from pathlib import Path

import moving
import pytest
from live_cluster import Answer, all_ready, greedy, is_idle
from model_zoo import write_model
from unlike_engines import UnlikeEngines
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.protocol.kvlayout import KvCode

pytestmark = pytest.mark.slow

NUM_TOKENS, LONG = 100, 250  # of an answer, and of one that moves
BEFORE = 10  # tokens of an answer when its decode worker is killed
POOLS = Pools(("prefill-0",), ("decode-0",))
FLAGS = {"dtype": "float32", "num_pages": 200, "max_model_len": 1000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("model"), **moving.MODEL_SHAPE)


def own_flags(source: KvCode | None, target: KvCode | None) -> dict[str, dict[str, object]]:
    return {"prefill-0": {"kv_cache_dtype": source or "auto"}, "decode-0": {"kv_cache_dtype": target or "auto"}}


@dataclass
class Killed:
    """An answer whose decode worker is killed when the client has its first tokens."""

    cluster: WiredCluster

    def answer(self, asked: list[int]) -> Answer:
        answer, call = Answer(), self.cluster.start(greedy(asked, NUM_TOKENS))
        for reply in call:
            answer.add(reply)
            if len(answer.tokens.get(0, ())) >= BEFORE:
                break
        self.cluster.kill("decode-0")
        self.cluster.wiring.start_again("decode-0")
        return answer.read(call)


def is_cut_somewhere(engines: UnlikeEngines, asked: list[int], found: list[int]) -> bool:
    """Return whether an answer is what the engines give if the prompt is computed again with some of its tokens."""
    whole = engines.answer(asked, NUM_TOKENS)
    same = next((i for i, (one, other) in enumerate(zip(found, whole, strict=True)) if one != other), NUM_TOKENS)
    if same == NUM_TOKENS:
        return True
    cuts = range(BEFORE, same + 1)
    return any(engines.answer(asked + found[:cut], NUM_TOKENS - cut) == found[cut:] for cut in cuts)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, marks=pytest.mark.long)
        for pair in ((None, "int8"), (None, "fp8_e4m3"), ("int8", None), ("fp8_e4m3", "int8"))
    ],
)
def test_unlike_workers_answer_as_two_engines_also_after_a_kill(
    tmp_path: Path, model: Path, source: KvCode | None, target: KvCode | None
) -> None:
    engines = UnlikeEngines(model, (source, target))
    asked, due = zip(*[engines.untied(length, NUM_TOKENS) for length in (150, 30)], strict=True)
    with wired_cluster(tmp_path, model, POOLS, FLAGS, own_flags=own_flags(source, target)) as cluster:
        cluster.introduce()
        answers = [cluster.generate(greedy(each, NUM_TOKENS)) for each in asked]
        assert [answer.tokens[0] for answer in answers] == [*due]
        assert [answer.ledger.decode_worker for answer in answers] == ["decode-0"] * 2
        status = cluster.status()
        layouts = {each.registration.worker_id: each.registration.layout for each in status.workers}
        row_bytes = 4 * layouts["decode-0"].head_dim if target is None else layouts["decode-0"].head_dim + 4
        page_bytes = layouts["decode-0"].num_layers * 2 * layouts["decode-0"].num_kv_heads * 16 * row_bytes
        sent_bytes = [-(-len(each) // 16) * page_bytes for each in asked]
        assert [answer.ledger.handoff_bytes for answer in answers] == sent_bytes
        killed = Killed(cluster).answer(asked[0])
        assert len(killed.tokens[0]) == NUM_TOKENS
        assert is_cut_somewhere(engines, asked[0], killed.tokens[0])
        status = cluster.wait_for(lambda status: all_ready(2)(status) and is_idle(status), 60)
        assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0]
        assert [worker.load.pages_leaked for worker in status.workers] == [0, 0]


@pytest.mark.long
def test_an_answer_that_moves_to_another_type_goes_on_from_converted_pages(tmp_path: Path, model: Path) -> None:
    codes: dict[str, KvCode | None] = {"decode-0": "int8", "decode-1": None}
    own = {name: {"kv_cache_dtype": code or "auto"} for name, code in codes.items()}
    engines = UnlikeEngines(model, (None, "int8"))
    asked, _ = engines.untied(150, LONG)
    with wired_cluster(tmp_path, model, moving.POOLS, moving.WORKER_FLAGS, own_flags=own) as cluster:
        cluster.introduce()
        moving.introduce(cluster)
        running = moving.Running.of(cluster, greedy(asked, LONG))
        assert running.move() == 1
        cluster.wait_for(lambda status: moving.num_moved(status) > moving.num_moved(running.before), 20)
        moved = running.end()
    assert moved.ledger.decode_worker == running.target
    (move,) = moved.ledger.moves
    engines = UnlikeEngines(model, (None, codes[running.source], codes[running.target]))
    due = engines.answer(asked, LONG, move.num_tokens)
    assert moved.tokens[0][: engines.num_sure] == due[: engines.num_sure]
    assert engines.num_sure > move.num_tokens + 20, "the test needs another prompt"


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "target", "name", "by"),
    [
        (None, "int8", "prefill-0", "tensor_parallel_size"),
        (None, "int8", "prefill-0", "pipeline_parallel_size"),
        ("int8", None, "prefill-0", "tensor_parallel_size"),
        (None, "fp8_e4m3", "decode-0", "tensor_parallel_size"),
        ("fp8_e4m3", "int8", "decode-0", "pipeline_parallel_size"),
    ],
)
def test_a_worker_of_two_ranks_hands_over_to_one_of_another_type_or_takes_over(
    tmp_path: Path, model: Path, source: KvCode | None, target: KvCode | None, name: str, by: str
) -> None:
    own = own_flags(source, target)
    own[name] |= {by: 2, "num_threads": 2}
    engines = UnlikeEngines(model, (source, target))
    asked, due = engines.untied(100, NUM_TOKENS)
    with wired_cluster(tmp_path, model, POOLS, FLAGS, own_flags=own) as cluster:
        answer = cluster.generate(greedy(asked, NUM_TOKENS))
    assert answer.tokens[0] == due
    assert answer.ledger.decode_worker == "decode-0"


@pytest.mark.long
def test_a_router_that_may_not_pair_them_says_why(tmp_path: Path, model: Path) -> None:
    strict = {"converts_kv": False}
    with wired_cluster(tmp_path, model, POOLS, FLAGS, strict, own_flags(None, "int8")) as cluster:
        status = cluster.status()
    assert reasons(status) == {
        "prefill-0": "no compatible decode worker: dtype: float32 != int8, and converts_kv is off",
        "decode-0": "no compatible prefill worker: dtype: float32 != int8, and converts_kv is off",
    }


def reasons(status: admin.ClusterStatus) -> dict[str, str]:
    return {worker.registration.worker_id: worker.unroutable for worker in status.workers}
