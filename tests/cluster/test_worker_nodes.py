"""A worker whose ranks are on two machines serves as one rank would, and ends as a whole, on both."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from equal_states import SHAPES
from live_cluster import all_ready, greedy, is_idle
from looking import until
from model_zoo import assert_right, load_oracle, prompt, write_model
from unlike_engines import UnlikeEngines
from wired_cluster import Pools, wired_cluster
from worker_nodes import ranks_of, worker_node

from pdserve.base.processes import DEVICE_EXIT_STATUS
from pdserve.base.signals import SAME_REQUEST_S
from pdserve.launch.folder import free_port
from pdserve.launch.plan import flag_arguments
from pdserve.protocol.kvlayout import KvCode

HOST, OTHER = "127.0.0.1", "127.0.0.3"  # of the worker, and of its second machine
FLAGS = {"rank_memory": "own", "dtype": "float32", "num_pages": 200}
TWO_NODES = {"nnodes": 2, "tensor_parallel_size": 2}
START_S, NOTICED_S = 60, 40  # a machine that is frozen counts as ended after 15 s

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("model"))


@pytest.mark.long
def test_a_worker_of_one_rank_hands_off_to_one_of_two_machines_which_answers_as_transformers_does(
    model: Path, tmp_path: Path
) -> None:
    port, oracle = free_port(HOST), load_oracle(model)
    own = {"decode-0": {**TWO_NODES, "master_port": port}}
    with worker_node(tmp_path, model, port, handoff_host=OTHER) as node:
        pools = Pools(("prefill-0",), ("decode-0",))
        with wired_cluster(tmp_path, model, pools, FLAGS, own_flags=own) as cluster:
            asked = [prompt(length, length) for length in (1, 16, 40, 130)]
            answers = cluster.generate_all([greedy(each, 24) for each in asked])
            for each, answer in zip(asked, answers, strict=True):
                assert_right(oracle, each, answer.tokens[0], 24)
                assert answer.ledger.handoff_bytes > 0
            status = cluster.wait_for(is_idle, 5)
            assert sum(worker.load.num_digest_mismatches for worker in status.workers) == 0
            (rank,) = ranks_of(node)
            listening = {each.laddr.ip for each in rank.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
            assert OTHER in listening, "gloo listens on the address that was named"
            assert listening <= {HOST, OTHER}, "UCX, on all addresses of the interface"
        assert node.wait(10) == 0, "it ends with the worker, which has drained"
        assert not rank.is_running()


@pytest.mark.long
@pytest.mark.parametrize("code", ["int8", "fp8_e4m3"])
def test_ranks_on_two_machines_take_over_pages_of_a_byte_a_value(model: Path, tmp_path: Path, code: KvCode) -> None:
    port, engines = free_port(HOST), UnlikeEngines(model, (code, code))
    flags, own = {**FLAGS, "kv_cache_dtype": code}, {"decode-0": {**TWO_NODES, "master_port": port}}
    asked, due = zip(*[engines.untied(length, 24) for length in (16, 130)], strict=True)
    with (
        worker_node(tmp_path, model, port, handoff_host=OTHER),
        wired_cluster(tmp_path, model, Pools(("prefill-0",), ("decode-0",)), flags, own_flags=own) as cluster,
    ):
        answers = cluster.generate_all([greedy(each, 24) for each in asked])
        status = cluster.wait_for(is_idle, 5)
    assert [answer.tokens[0] for answer in answers] == [*due]
    assert all(answer.ledger.handoff_bytes > 0 for answer in answers)
    assert {worker.registration.layout.dtype for worker in status.workers} == {code}
    assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0]


@pytest.mark.long
def test_ranks_on_two_machines_verify_guesses_of_a_draft_model_on_the_first(model: Path, tmp_path: Path) -> None:
    port, guessed = free_port(HOST), json.dumps({"method": "draft_model", "model": str(model)})
    own, pools = {"decode-0": {**TWO_NODES, "master_port": port}}, Pools(("prefill-0",), ("decode-0",))
    flags = {**FLAGS, "speculative_config": guessed}
    with (
        worker_node(tmp_path, model, port, handoff_host=OTHER),
        wired_cluster(tmp_path, model, pools, flags, own_flags=own) as cluster,
    ):
        asked = prompt(16, "guesses")
        answer = cluster.generate(greedy(asked, 60))
    assert_right(load_oracle(model), asked, answer.tokens[0], 60)
    (drafts,) = answer.ledger.drafts.values()
    assert sum(drafts.num_accepted_tokens_per_pos) > 0


@pytest.mark.long
def test_ranks_on_two_machines_keep_parts_of_states_also_behind_guesses(tmp_path: Path) -> None:
    model, port = write_model("qwen3.5", tmp_path / "model", **SHAPES["qwen3.5"]), free_port(HOST)
    flags = {**FLAGS, "speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3})}
    own, oracle = {"decode-0": {**TWO_NODES, "master_port": port}}, load_oracle(model)
    with (
        worker_node(tmp_path, model, port, handoff_host=OTHER),
        wired_cluster(tmp_path, model, Pools(("prefill-0",), ("decode-0",)), flags, own_flags=own) as cluster,
    ):
        asked = [prompt(length, length) for length in (1, 40, 130)]
        answers = cluster.generate_all([greedy(each, 60) for each in asked])
        status = cluster.wait_for(is_idle, 5)
    for each, answer in zip(asked, answers, strict=True):
        assert_right(oracle, each, answer.tokens[0], 60)
        assert answer.ledger.handoff_bytes > 0
    assert [worker.load.num_digest_mismatches for worker in status.workers] == [0, 0]
    assert sum(answer.ledger.drafts["ngram"].num_draft_tokens for answer in answers) > 0


@pytest.mark.long
def test_ranks_with_devices_on_two_machines_take_over_from_two_on_one(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 2}
    model, port = write_model("llama3", tmp_path / "model", **shape), free_port(HOST)
    flags = {**FLAGS, "device": "interpreter", "tensor_parallel_size": 2, "max_num_seqs": 2, "page_size": 16}
    own = {"decode-0": {"nnodes": 2, "master_port": port}}
    with worker_node(tmp_path, model, port) as node:
        pools = Pools(("prefill-0",), ("decode-0",))
        with wired_cluster(tmp_path, model, pools, flags, own_flags=own) as cluster:
            asked = prompt(40, 40)
            answer = cluster.generate(greedy(asked, 8))
            assert_right(load_oracle(model), asked, answer.tokens[0], 8)
            assert answer.ledger.handoff_bytes > 0
        assert node.wait(10) == 0


@pytest.mark.long
def test_the_next_process_of_a_worker_attaches_once_its_machines_have_joined(model: Path, tmp_path: Path) -> None:
    ports = free_port(HOST), free_port(HOST)
    own, secret = {"decode-0": {**TWO_NODES, "master_port": ports[0]}}, {"secret_file": tmp_path / "secret"}
    beside = tmp_path / "later"
    beside.mkdir()
    with worker_node(tmp_path, model, ports[0]) as node, worker_node(beside, model, ports[1], **secret) as later:
        later.send_signal(signal.SIGSTOP)
        pools = Pools(("prefill-0",), ("decode-0",))
        with wired_cluster(tmp_path, model, pools, FLAGS, own_flags=own) as cluster:
            wiring = cluster.wiring
            process, former = wiring.started["decode-0"]
            node.kill()
            assert process.wait(NOTICED_S) == DEVICE_EXIT_STATUS
            wiring.start_again("decode-0", master_port=ports[1])
            until(lambda: wiring.log_of("decode-0").count("other nodes join at") == 2, START_S)
            attached = [each.registration.incarnation for each in cluster.status().workers]
            assert wiring.started["decode-0"][1].incarnation not in attached, "the former one may still write"
            later.send_signal(signal.SIGCONT)
            cluster.wait_for(all_ready(2), START_S)
            assert wiring.started["decode-0"][1].incarnation != former.incarnation
            asked = prompt(40, 40)
            assert_right(load_oracle(model), asked, cluster.generate(greedy(asked, 8)).tokens[0], 8)


@dataclass
class TwoMachines:
    """A worker alone, without a router, and its second machine."""

    worker: subprocess.Popen[bytes]
    node: subprocess.Popen[bytes]
    log: Path

    @property
    def ranks(self) -> list[psutil.Process]:
        return ranks_of(self.node)


@contextmanager
def two_machines(folder: Path, model: Path, node_model: Path | None = None, **flags: object) -> Iterator[TwoMachines]:
    """Start both for the length of the block."""
    port, log = free_port(HOST), folder / "worker.log"
    with worker_node(folder, node_model or model, port) as node, log.open("ab") as written:
        own = {"model": model, "secret_file": folder / "secret", "role": "decode", "worker_id": "w", "num_threads": 1}
        own |= {**FLAGS, **TWO_NODES, "routers": (f"{HOST}:1",), "master_port": port, **flags}
        command = [sys.executable, "-P", "-m", "pdserve", "worker", *flag_arguments(own)]
        with subprocess.Popen(command, stdout=written, stderr=written) as worker:
            try:
                yield TwoMachines(worker, node, log)
            finally:
                worker.kill()


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[TwoMachines]:
    with two_machines(folder, model) as machines:
        until(lambda: " ready: " in machines.log.read_text(), START_S)
        yield machines


LONG = pytest.mark.long


@LONG
@pytest.mark.parametrize("killed", ["node", "rank", "worker"])
def test_the_end_of_any_process_ends_the_worker_on_both_machines(model: Path, tmp_path: Path, killed: str) -> None:
    with serving(tmp_path, model) as machines:
        (rank,) = machines.ranks
        victim = {"node": machines.node, "worker": machines.worker, "rank": rank}[killed]
        victim.kill()
        for name, process in (("worker", machines.worker), ("node", machines.node)):
            assert process.wait(15) == (-signal.SIGKILL if name == killed else DEVICE_EXIT_STATUS)
        until(lambda: not rank.is_running(), 5)


@pytest.mark.long
@pytest.mark.parametrize("frozen", ["node", "worker"])
def test_a_machine_that_is_frozen_is_noticed_and_ends_once_it_thaws(model: Path, tmp_path: Path, frozen: str) -> None:
    with serving(tmp_path, model) as machines:
        (rank,) = machines.ranks
        victim, other = machines.node, machines.worker
        if frozen == "worker":
            victim, other = other, victim
        victim.send_signal(signal.SIGSTOP)
        assert other.wait(NOTICED_S) == DEVICE_EXIT_STATUS
        assert victim.poll() is None
        assert rank.is_running() == (frozen == "node"), "a frozen machine ends nothing"
        victim.send_signal(signal.SIGCONT)
        assert victim.wait(15) == DEVICE_EXIT_STATUS
        until(lambda: not rank.is_running(), 5)


@LONG
@pytest.mark.parametrize("asked", ["worker", "node"])
def test_a_second_signal_ends_a_process_at_once_though_the_other_machine_is_frozen(
    model: Path, tmp_path: Path, asked: str
) -> None:
    with serving(tmp_path, model) as machines:
        (rank,) = machines.ranks
        process, other = machines.worker, machines.node
        if asked == "node":
            process, other = other, process
        other.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2 * SAME_REQUEST_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 128 + signal.SIGINT
        if asked == "worker":
            assert rank.is_running(), "a frozen machine ends nothing"
        else:
            until(lambda: not rank.is_running(), 5)


@pytest.mark.long
def test_a_machine_that_is_frozen_while_its_rank_loads_is_noticed(model: Path, tmp_path: Path) -> None:
    with two_machines(tmp_path, model) as machines:
        until(lambda: machines.ranks, START_S)
        (rank,) = machines.ranks
        machines.node.send_signal(signal.SIGSTOP)
        rank.suspend()
        assert machines.worker.wait(NOTICED_S) == DEVICE_EXIT_STATUS
        rank.resume()
        machines.node.send_signal(signal.SIGCONT)
        assert machines.node.wait(15) == DEVICE_EXIT_STATUS


@pytest.mark.long
def test_a_machine_that_is_asked_to_end_lets_the_whole_worker_drain(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, model) as machines:
        machines.node.terminate()
        assert machines.worker.wait(30) == 0
        assert machines.node.wait(15) == 0


@pytest.mark.long
def test_a_machine_with_another_model_is_refused_and_the_worker_does_not_start(model: Path, tmp_path: Path) -> None:
    other = write_model("llama3", tmp_path / "other", num_hidden_layers=1)
    with two_machines(tmp_path, model, other, join_timeout_s=12.0) as machines:
        assert machines.node.wait(START_S) == 2
        assert machines.worker.wait(START_S) == 2
    refusal = "model: its files differ from the worker's"
    assert refusal in (tmp_path / "node.log").read_text()
    assert f"nodes [1] have not joined within 12 s; node 1 is refused: {refusal}" in machines.log.read_text()
