"""`pdserve up --on ray --policy`: pools on a real Ray follow their load, whatever of Ray dies on the way."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import moving
import psutil
import pytest
from live_cluster import LiveCluster, greedy, live_cluster
from looking import until
from model_zoo import first_disagreement, prompt
from ray_nodes import RayNodes, end_node, ray_head
from transformers import PreTrainedModel

from pdserve.autoscaler.journal import read_record
from pdserve.launch.folder import RECORD_FILE
from pdserve.proto.v1 import admin_pb2 as admin

MODEL_SHAPE = moving.MODEL_SHAPE
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
# A decode worker has enough with 3 sequences.
POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 60000, tpotMs: 60000}
budget: {maxDevices: 3}
interval: {forecast: 2s, react: 300ms}
pools:
  prefill: {maxReplicas: 1, startup: 1s}
  decode:
    maxReplicas: 2
    startup: 1s
    signals: [{metric: running_sequences, target: 3}]
    behavior: {scaleDown: {stabilizationWindowSeconds: 2, policies: [{type: Pods, value: 3, periodSeconds: 1}]}}
roleSwitch: {enabled: false, minDwell: 0s}
actuator: {kind: ray, timeout: 5s, address: ADDRESS, resourcesPerDevice: {CPU: 1}}
"""
NUM_CLIENTS, NUM_TOKENS, CHANGE_S = 6, 120, 120

Condition = Callable[[admin.ClusterStatus], bool]


def test_pools_follow_their_load_while_an_actor_and_a_node_are_killed(
    model: Path, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    with ray_head(num_cpus=2) as nodes, cluster_on(nodes, model, tmp_path) as cluster:
        cluster.wait_for(decoding(1), CHANGE_S)
        node = nodes.start(f"--address={nodes.address}", "--num-cpus=1")
        with asked_all_the_time(cluster, oracle):
            cluster.wait_for(decoding(2), CHANGE_S)
            before = cluster.status()
            actor_of(nodes, "prefill-0").kill()
            cluster.wait_for(restarted("prefill-0", before), CHANGE_S)
            end_node(node)
            cluster.wait_for(decoding(1), CHANGE_S)
            nodes.start(f"--address={nodes.address}", "--num-cpus=1")
            cluster.wait_for(decoding(2), CHANGE_S)
        cluster.wait_for(decoding(1), CHANGE_S)


def test_workers_serve_without_the_control_service_which_then_has_their_actors_and_adds_to_them(
    model: Path, oracle: PreTrainedModel, tmp_path: Path
) -> None:
    with ray_head(num_cpus=3, is_kept=True) as nodes, cluster_on(nodes, model, tmp_path) as cluster:
        cluster.wait_for(decoding(1), CHANGE_S)
        before = incarnations(cluster.status())
        with nodes.without_control_service():
            until_noted(cluster, "nothing is decided")
            asked = prompt(60, "without")
            tokens = cluster.generate(greedy(asked, NUM_TOKENS)).tokens[0]
            assert len(tokens) == NUM_TOKENS
            assert first_disagreement(oracle, asked, tokens) is None
        with asked_all_the_time(cluster, oracle):
            cluster.wait_for(decoding(2), CHANGE_S)
        cluster.wait_for(decoding(1), CHANGE_S)
        after = incarnations(cluster.status())
        assert after["prefill-0"] == before["prefill-0"]
        assert len(after) == 2


@contextmanager
def cluster_on(nodes: RayNodes, model: Path, folder: Path) -> Iterator[LiveCluster]:
    policy = folder / "policy.yaml"
    policy.write_text(POLICY.replace("ADDRESS", nodes.address))
    flags = ("--on", "ray", "--policy", str(policy), "--dtype", "float32", "--num-pages", "600")
    with live_cluster(folder, model, *flags) as cluster:
        yield cluster


def until_noted(cluster: LiveCluster, part: str) -> None:
    """Wait until the autoscaler has noted something."""
    record_file = cluster.state.secret_file.with_name(RECORD_FILE)
    until(
        lambda: any(part in entry.text for entry in read_record(record_file).entries),
        CHANGE_S,
        lambda: read_record(record_file),
    )


def incarnations(status: admin.ClusterStatus) -> dict[str, int]:
    return {each.registration.worker_id: each.registration.incarnation for each in status.workers}


@contextmanager
def asked_all_the_time(cluster: LiveCluster, oracle: PreTrainedModel) -> Iterator[None]:
    """Ask for the length of the block. No request may fail, and each answer must be the oracle's."""
    prompts = [prompt(60 + 10 * number, f"load {number}") for number in range(NUM_CLIENTS)]
    over = threading.Event()

    def ask(prompt: list[int]) -> list[list[int]]:
        answers = []
        while not over.is_set():
            answers.append(cluster.generate(greedy(prompt, NUM_TOKENS)).tokens[0])
        return answers

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        pending = [pool.submit(ask, prompt) for prompt in prompts]
        try:
            yield
        finally:
            over.set()
        answers = [each.result() for each in pending]
    for asked, given in zip(prompts, answers, strict=True):
        assert given
        for tokens in {tuple(each) for each in given}:
            assert len(tokens) == NUM_TOKENS
            assert first_disagreement(oracle, asked, list(tokens)) is None


def decoding(count: int) -> Condition:
    """Return whether so many decode workers are ready."""

    def holds(status: admin.ClusterStatus) -> bool:
        ready = [each.registration.ready for each in status.workers if each.registration.worker_id.startswith("decode")]
        return ready == [True] * count

    return holds


def restarted(name: str, before: admin.ClusterStatus) -> Condition:
    """Return whether another process of a worker is ready."""
    (former,) = (each.registration for each in before.workers if each.registration.worker_id == name)

    def holds(status: admin.ClusterStatus) -> bool:
        return any(
            each.registration.worker_id == name
            and each.registration.ready
            and each.registration.incarnation > former.incarnation
            for each in status.workers
        )

    return holds


def actor_of(nodes: RayNodes, name: str) -> psutil.Process:
    """Return the process of the actor that owns a worker."""
    for process in nodes.all_processes():
        command = process.cmdline()
        if "--worker-id" in command and command[command.index("--worker-id") + 1] == name:
            actor = process.parent()
            assert actor is not None
            return actor
    raise AssertionError(f"no process of {name}")
