"""A lease that lapses between real processes: noticed before any router loses patience, and repaired by the thaw."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_cluster import all_ready, greedy, is_idle, live_cluster, load_of
from model_zoo import VOCAB, write_model

PREFILLS, DECODE = ("prefill-0", "prefill-1"), "decode-0"


@pytest.mark.long
def test_a_frozen_prefill_worker_loses_its_grants_and_its_pages_come_back_when_it_thaws(tmp_path: Path) -> None:
    rng = random.Random(0)
    asked = [rng.randrange(3, VOCAB) for _ in range(40)]
    model = write_model("llama3", tmp_path / "llama3")
    with live_cluster(tmp_path, model, "--dtype", "float32", "--prefill", "2", "--lease-s", "1.5") as cluster:
        cluster.wait_for(all_ready(3), 60)
        for first in (1, 2):
            cluster.generate(greedy([first, *asked], 3))  # each pair has met
        cluster.wait_for(is_idle, 10)
        with ThreadPoolExecutor(1) as pool:
            with cluster.frozen(*PREFILLS):
                pending = pool.submit(cluster.generate, greedy(asked, 20))
                cluster.wait_for(lambda status: load_of(status, DECODE).pages_quarantined > 0, 20)
            assert len(pending.result().tokens[0]) == 20
        status = cluster.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 20)
        assert [worker.load.pages_leaked for worker in status.workers] == [0, 0, 0]
        assert [dict(worker.load.refused) for worker in status.workers] == [{}, {}, {}]
    (log,) = tmp_path.glob("pdserve/*/logs/router.log")
    assert "LEASE_LAPSED: lease of 1.5 s lapsed: silent for" in log.read_text()
