"""A worker on two machines that share no network but a cable, with certificates. Run by test_two_machines.py.

The router, all other workers and the worker's own process are on this machine, in a network namespace of these tests.
"""

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from live_cluster import all_ready, greedy, is_idle, load_of
from looking import until
from model_zoo import assert_right, prompt
from second_machine import FIRST, SECOND, SecondMachine, second_machine
from transformers import PreTrainedModel
from wired_cluster import Pools, WiredCluster, wired_cluster
from worker_nodes import ranks_of, worker_node

from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.launch.authority import Authority, write_certificates
from pdserve.launch.folder import free_port
from pdserve.net.certificates import Part

pytestmark = pytest.mark.timeout(250)

NAME = "w0.two-machines.example"  # of the worker's machine
START_S, NOTICED_S = 60, 20  # a machine that is cut off counts as ended after 15 s
POOLS = Pools(("prefill-0",), ("decode-0", "decode-1"))
FLAGS = {"rank_memory": "own", "dtype": "float32", "num_pages": 200, "handoff_host": FIRST}
LONG = 300  # tokens of an answer that takes 6 s or more
STEP_S = 0.02


@dataclass
class Machines:
    cluster: WiredCluster
    second: SecondMachine
    node: subprocess.Popen[bytes]
    port: int
    folder: Path

    def node_flags(self, identity_dir: Path | None = None) -> dict[str, object]:
        shown = identity_dir or self.cluster.certificates / "worker"
        own = {"master_addr": FIRST, "handoff_host": SECOND, "secret_file": self.cluster.wiring.secret_file}
        return {"enter": self.second.enter, "identity_dir": shown, **own}


@pytest.fixture(scope="module")
def machines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Both machines; the second one is there first, and knows the first one's name only when its worker starts."""
    folder = tmp_path_factory.mktemp("machines")
    write_certificates(folder / "certificates", (), 1)
    with ExitStack() as stack:
        second, port = stack.enter_context(second_machine(folder)), free_port(FIRST)
        own = {"enter": second.enter, "identity_dir": folder / "certificates" / "worker", "handoff_host": SECOND}
        node = stack.enter_context(worker_node(folder, model, port, master_addr=NAME, **own))
        log = folder / "node.log"
        until(lambda: f"the worker is not reached yet: {NAME}" in log.read_text(), START_S)
        with second.hosts.open("a") as hosts:
            hosts.write(f"{FIRST} {NAME}\n")
        nodes = {"nnodes": 2, "tensor_parallel_size": 2, "master_port": port}
        cluster = stack.enter_context(
            wired_cluster(folder, model, POOLS, {**FLAGS, "test_step_s": STEP_S}, own_flags={"decode-0": nodes})
        )
        yield Machines(cluster, second, node, port, folder)


def test_answers_are_those_of_transformers_and_pages_go_to_the_other_machine_itself(
    machines: Machines, oracle: PreTrainedModel
) -> None:
    cluster, before = machines.cluster, machines.second.received_bytes()
    asked = [prompt(length, length) for length in (1, 16, 40, 130, 131, 132)]
    answers = cluster.generate_all([greedy(each, 24) for each in asked])
    for each, answer in zip(asked, answers, strict=True):
        assert_right(oracle, each, answer.tokens[0], 24)
    taken = [answer.ledger.handoff_bytes for answer in answers if answer.ledger.decode_worker == "decode-0"]
    assert sum(taken) > 0, "workers of a pool take turns"
    assert machines.second.received_bytes() - before > sum(taken) / 2, "half of the heads are there"
    status = cluster.wait_for(is_idle, 5)
    assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0


def test_who_is_none_of_its_machines_is_refused_by_name_and_costs_the_worker_nothing(
    machines: Machines, model: Path, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    certificates, day = machines.cluster.certificates, timedelta(days=1)
    Authority.read(certificates).write_identity(tmp_path / "domain", Part.WORKER, "other", day)
    Authority.new().write_identity(tmp_path / "authority", Part.WORKER, "pdserve", day)
    refused = {
        "late": (certificates / "worker", 2, "node_rank: 1 has joined already"),
        "router": (certificates / "router", 2, "identity_dir: .* is of a router, a worker's is needed"),
        "domain": (tmp_path / "domain", 2, "identity_dir: .* refuses it: certificates of 'spiffe://other/pdserve/wor"),
        "authority": (tmp_path / "authority", 1, "join_timeout_s: .* is not reached .* Tls handshake failed"),
    }
    with ExitStack() as stack:
        nodes = {}
        for name, (shown, _, _) in refused.items():
            (folder := tmp_path / f"of-{name}").mkdir()
            flags = machines.node_flags(shown) | {"join_timeout_s": 5.0 if name == "authority" else 60.0}
            nodes[name] = stack.enter_context(worker_node(folder, model, machines.port, **flags))
        for name, (_, status, why) in refused.items():
            assert nodes[name].wait(START_S) == status
            assert re.search(why, log := (tmp_path / f"of-{name}" / "node.log").read_text()), log
    assert machines.node.poll() is None
    asked = [prompt(40, seed) for seed in range(4)]
    answers = machines.cluster.generate_all([greedy(each, 24) for each in asked])
    for each, answer in zip(asked, answers, strict=True):
        assert_right(oracle, each, answer.tokens[0], 24)
        assert answer.ledger.attempts == 1
    assert "decode-0" in {answer.ledger.decode_worker for answer in answers}


def test_a_cable_that_is_cut_ends_both_machines_and_another_worker_goes_on_with_the_answer(
    machines: Machines, model: Path, oracle: PreTrainedModel
) -> None:
    cluster, wiring = machines.cluster, machines.cluster.wiring
    (rank,) = ranks_of(machines.node)
    asked = [prompt(40, f"cut {seed}") for seed in range(4)]
    with ThreadPoolExecutor(1) as beside:
        answering = beside.submit(cluster.generate_all, [greedy(each, LONG) for each in asked])
        cluster.wait_for(lambda status: load_of(status, "decode-0").num_running > 0, 20)
        machines.second.cut()
        assert wiring.started["decode-0"][0].wait(NOTICED_S) == DEVICE_EXIT_STATUS
        assert machines.node.wait(NOTICED_S) == DEVICE_EXIT_STATUS
        assert not psutil.pid_exists(rank.pid)
        assert "Traceback" not in (machines.folder / "node.log").read_text(), "a lost connection is named"
        answers = answering.result(60)
    for each, answer in zip(asked, answers, strict=True):
        assert_right(oracle, each, answer.tokens[0], LONG)
    placed_again = [answer.ledger for answer in answers if answer.ledger.attempts > 1]
    assert placed_again
    assert {each.decode_worker for each in placed_again} == {"decode-1"}
    machines.second.mend()
    with worker_node(machines.folder, model, machines.port, **machines.node_flags()):
        wiring.start_again("decode-0")
        cluster.wait_for(all_ready(3), START_S)
        answers = cluster.generate_all([greedy(each, 24) for each in asked])
        for each, answer in zip(asked, answers, strict=True):
            assert_right(oracle, each, answer.tokens[0], 24)
        assert "decode-0" in {answer.ledger.decode_worker for answer in answers}
        cluster.wait_for(is_idle, 10)
        cluster.wiring.started["decode-0"][0].terminate()
        assert cluster.wiring.started["decode-0"][0].wait(START_S) == 0
