"""A prefill worker that was frozen in mid-write spoils nothing when it thaws, whoever wanted its pages meanwhile."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from live_cluster import Answer, LiveCluster, all_ready, greedy, is_idle, live_cluster, load_of
from model_zoo import assert_right, first_disagreement, load_oracle, prompt
from transformers import PreTrainedModel

from pdserve.proto.v1 import admin_pb2 as admin

pytestmark = pytest.mark.long

PREFILLS, DECODE = ("prefill-0", "prefill-1"), "decode-0"
PAGE_SIZE = 16
NUM_PAGES = 280  # of 256 KiB
PROMPT = 2000  # tokens, 31 MiB of KV: more than the sockets between two workers hold
PROMPT_PAGES = PROMPT // PAGE_SIZE
OVER_TCP = ("--handoff-transport", "tcp")  # writes need the receiver's help: one that is frozen holds them up
MODEL_SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


@pytest.fixture
def cluster(model: Path, tmp_path: Path) -> Iterator[LiveCluster]:
    flags = ("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES), "--prefill", "2")
    with live_cluster(tmp_path, model, *flags, *OVER_TCP) as cluster:
        cluster.wait_for(all_ready(3), 60)
        yield cluster


class Crowd:
    """Streams that are asked for together."""

    def __init__(self, cluster: LiveCluster, first_seed: int, count: int, num_tokens: int) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._num_tokens = num_tokens
        self._asked = [prompt(150, seed) for seed in range(first_seed, first_seed + count)]
        self.answers: list[Future[Answer]] = [
            self._pool.submit(cluster.generate, greedy(asked, num_tokens)) for asked in self._asked
        ]

    def assert_right(self, oracle: PreTrainedModel) -> None:
        for asked, pending in zip(self._asked, self.answers, strict=True):
            answer = pending.result()
            assert_right(oracle, asked, answer.tokens[0], self._num_tokens)
        self._pool.shutdown()


def has_no_room(status: admin.ClusterStatus) -> bool:
    """Return whether the decode worker has held all pages but those in quarantine, and more was wanted."""
    load = load_of(status, DECODE)
    return load.pages_quarantined > 0 and load.num_preemptions > 0


def freeze_in_mid_write(cluster: LiveCluster, asked: list[int], frozen: ExitStack) -> tuple[grpc.Call, Answer]:
    """Ask for an answer, and freeze its prefill worker while that writes the prompt's pages; thaws with `frozen`.

    The decode worker grants before the writer can use it, and does not read while the writer writes: nothing here
    depends on who is fast.
    """
    with cluster.frozen(*PREFILLS):
        call = cluster.start(greedy(asked, 30))
        granted = cluster.wait_for(lambda status: load_of(status, DECODE).pages_granted == PROMPT_PAGES, 4)
    (writer,) = (w.registration.worker_id for w in granted.workers if w.num_assigned and is_prefill(w))
    answer = Answer()
    with cluster.frozen(DECODE):
        answer.add(next(call))  # the first token: every page is computed and on its way
        frozen.enter_context(cluster.frozen(writer))
    return call, answer


def is_prefill(worker: admin.WorkerStatus) -> bool:
    return worker.registration.worker_id in PREFILLS


def num_quarantined(cluster: LiveCluster) -> int:
    return load_of(cluster.status(), DECODE).pages_quarantined


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_writer_that_thaws_spoils_no_stream_and_its_pages_come_back_only_then(
    cluster: LiveCluster, model: Path
) -> None:
    oracle = load_oracle(model)
    for seed in (1, 2):
        cluster.generate(greedy(prompt(20, seed), 2))  # each pair has met
    cluster.wait_for(is_idle, 5)
    asked = prompt(PROMPT, 3)
    with ExitStack() as frozen:
        call, answer = freeze_in_mid_write(cluster, asked, frozen)
        cluster.wait_for(lambda status: load_of(status, DECODE).pages_quarantined == PROMPT_PAGES, 15)
        Crowd(cluster, 100, count=4, num_tokens=200).assert_right(oracle)
        answer.read(call)
        assert answer.ledger.attempts == 2
        assert len(answer.tokens[0]) == 30
        assert first_disagreement(oracle, asked, answer.tokens[0]) is None
        assert num_quarantined(cluster) == PROMPT_PAGES
        # Answers so long that the first still run when the last begins, however slowly one worker computes all prompts.
        crowd = Crowd(cluster, 200, count=10, num_tokens=500)
        cluster.wait_for(has_no_room, 20)
    crowd.assert_right(oracle)
    cluster.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 10)
