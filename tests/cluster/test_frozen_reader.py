"""A decode worker that freezes in mid-transfer holds pages of its prefill worker, which is replaced to make room."""

import random
import signal
from pathlib import Path

import pytest
from live_cluster import LiveCluster, all_ready, greedy, is_idle, live_cluster, load_of
from model_zoo import VOCAB, write_model

from pdserve.proto.v1 import admin_pb2 as admin

PREFILL, DECODE = "prefill-0", "decode-0"
PAGE_SIZE, NUM_PAGES = 16, 200  # of 256 KiB
PROMPT = 2000  # tokens, 31 MiB of KV: more than the sockets between two workers hold; most of the worker's pages
FLAGS = ("--dtype", "float32", "--page-size", str(PAGE_SIZE), "--num-pages", str(NUM_PAGES))
OVER_TCP = ("--handoff-transport", "tcp")  # writes need the receiver's help: one that is frozen holds them up
FAT_KV = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


def incarnation(status: admin.ClusterStatus) -> int:
    """Return which process of the prefill worker is ready; 0: none."""
    found = (w.registration for w in status.workers if w.registration.worker_id == PREFILL)
    return next((each.incarnation for each in found if each.ready), 0)


def freeze_reader_in_mid_write(cluster: LiveCluster, asked: list[int]) -> None:
    with cluster.frozen(PREFILL):
        call = cluster.start(greedy(asked, 30))
        cluster.wait_for(lambda status: load_of(status, DECODE).pages_granted == PROMPT // PAGE_SIZE, 4)
        cluster.signal(DECODE, signal.SIGSTOP)
    next(call)  # the first token: every page is computed and on its way
    call.cancel()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prefill_worker_whose_pages_a_frozen_decode_worker_holds_says_so_and_is_replaced(tmp_path: Path) -> None:
    rng = random.Random(0)
    model = write_model("llama3", tmp_path / "llama3", **FAT_KV)
    with live_cluster(tmp_path, model, *FLAGS, *OVER_TCP) as cluster:
        first = incarnation(cluster.wait_for(all_ready(2), 60))
        cluster.generate(greedy([1, 2, 3], 2))  # the pair has met
        cluster.wait_for(is_idle, 10)
        freeze_reader_in_mid_write(cluster, [rng.randrange(3, VOCAB) for _ in range(PROMPT)])
        cluster.wait_for(lambda status: incarnation(status) not in (0, first), 60)
        cluster.signal(DECODE, signal.SIGCONT)
        cluster.wait_for(all_ready(2), 60)
        assert len(cluster.generate(greedy([4, 5, 6], 5)).tokens[0]) == 5
        cluster.wait_for(is_idle, 20)
    (log,) = tmp_path.glob(f"pdserve/*/logs/{PREFILL}*.log")
    assert "draining: 125 of 200 pages are quarantined" in log.read_text()
