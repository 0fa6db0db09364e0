"""A cluster that follows a policy: it grows and shrinks under load, and nothing is doubled, whoever dies on the way."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import moving
import pytest
from live_cluster import LiveCluster, all_ready, greedy, is_idle, live_cluster
from looking import until
from model_zoo import first_disagreement, prompt
from transformers import PreTrainedModel

from pdserve.autoscaler.journal import Record, read_record
from pdserve.launch.folder import RECORD_FILE

MODEL_SHAPE = moving.MODEL_SHAPE
# A decode worker has enough with 3 sequences. The budget has room for one worker more than the launcher.
POLICY = """
apiVersion: pdserve/v1alpha1
kind: AutoscalingPolicy
objectives: {ttftMs: 60000, tpotMs: 60000}
budget: {maxDevices: 4}
interval: {forecast: 2s, react: 300ms}
pools:
  prefill: {maxReplicas: 1, startup: 1s}
  decode:
    minReplicas: LEAST
    maxReplicas: MOST
    startup: 1s
    signals: [{metric: running_sequences, target: 3}]
    behavior: {scaleDown: {stabilizationWindowSeconds: 2, policies: [{type: Pods, value: 3, periodSeconds: 1}]}}
roleSwitch: {enabled: false, minDwell: 0s}
actuator: {kind: process, timeout: 1s}
"""
FLAGS = ("--dtype", "float32", "--max-workers", "3", "--num-pages", "600")
NUM_CLIENTS = 6
BASE = {"prefill-0", "decode-0"}

pytestmark = pytest.mark.long


def policy_of(least: int, most: int = 2) -> str:
    return POLICY.replace("LEAST", str(least)).replace("MOST", str(most))


@dataclass
class Scaled:
    """A cluster and its policy."""

    cluster: LiveCluster
    policy: Path

    def allow(self, least: int, most: int = 2) -> None:
        """Write another policy, whole at once: how many decode workers there may be."""
        scratch = self.policy.with_suffix(".new")
        scratch.write_text(policy_of(least, most))
        scratch.replace(self.policy)

    @property
    def record(self) -> Record:
        return read_record(self.cluster.state.secret_file.with_name(RECORD_FILE))

    def workers(self) -> set[str]:
        return {process.name for process in self.cluster.state.processes} - {"router", "autoscaler"}

    def until(self, condition: Callable[[], bool], timeout_s: float = 40) -> None:
        """Wait for what only files show."""
        until(condition, timeout_s, lambda: (self.workers(), [each.text for each in self.record.entries]))

    def until_noted(self, part: str) -> None:
        self.until(lambda: any(part in entry.text for entry in self.record.entries))

    def until_workers(self, names: set[str]) -> None:
        """Wait until these workers, and no others, are there and ready."""
        self.until(lambda: self.workers() == names)
        self.cluster.wait_for(all_ready(len(names)), 40)


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    folder = tmp_path_factory.mktemp("scaled")
    policy = folder / "policy.yaml"
    policy.write_text(policy_of(1))
    with live_cluster(folder, model, "--policy", str(policy), *FLAGS) as cluster:
        yield Scaled(cluster, policy)


@pytest.fixture
def scaled(shared: Scaled) -> Iterator[Scaled]:
    yield shared
    shared.allow(1)
    shared.cluster.generate(greedy(prompt(20, "last"), 2))
    shared.until_workers(BASE)
    shared.cluster.wait_for(is_idle, 20)


def test_the_decode_pool_follows_its_load_and_no_answer_notices(scaled: Scaled, oracle: PreTrainedModel) -> None:
    prompts = [prompt(60 + 10 * number, f"load {number}") for number in range(NUM_CLIENTS)]
    enough = threading.Event()

    def ask(prompt: list[int]) -> list[list[int]]:
        answers = []
        while not enough.is_set():
            answers.append(scaled.cluster.generate(greedy(prompt, 120)).tokens[0])
        return answers

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        pending = [pool.submit(ask, prompt) for prompt in prompts]
        try:
            scaled.until_workers({*BASE, "decode-1"})
        finally:
            enough.set()
        answers = [each.result() for each in pending]
    scaled.until_workers(BASE)
    for asked, given in zip(prompts, answers, strict=True):
        assert given
        for tokens in {tuple(each) for each in given}:
            assert len(tokens) == 120
            assert first_disagreement(oracle, asked, list(tokens)) is None


def test_a_launcher_that_is_late_or_refuses_and_an_autoscaler_that_dies_in_mid_action_double_nothing(
    scaled: Scaled,
) -> None:
    cluster = scaled.cluster
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        scaled.allow(least=3, most=3)
        scaled.until_noted("no answer within 1 s")
        assert cluster.generate(greedy(prompt(20, "late"), 5)).tokens
    finally:
        cluster.process.send_signal(signal.SIGCONT)
    scaled.until(lambda: len(scaled.workers()) == 3)
    held = scaled.workers()
    (refused,) = {*BASE, "decode-1", "decode-2"} - held  # an order that was late is given again under its own name
    before = cluster.pid_of("autoscaler")
    cluster.signal("autoscaler", signal.SIGKILL)
    assert cluster.generate(greedy(prompt(20, "without"), 5)).tokens
    seen: list[set[str]] = []

    def has_converged() -> bool:
        seen.append(scaled.workers())
        state = cluster.state
        pid = state.pid_of("autoscaler")
        decided = [(each.num_replicas, each.desired) for each in scaled.record.pools if each.pool == "decode"]
        return pid not in (None, before) and scaled.record.unix_s > began_unix_s and decided == [(2, 3)]

    began_unix_s = time.time() + 1.0
    scaled.until(has_converged)
    scaled.until_noted(f"add {refused}: failed: add {refused}: RESOURCE_EXHAUSTED: --max-workers: 3 are there")
    scaled.until_workers(held)
    assert {frozenset(names) for names in seen} == {frozenset(held)}


def test_a_policy_that_is_broken_while_it_is_followed_changes_nothing_and_is_reported(scaled: Scaled) -> None:
    scaled.allow(least=3, most=2)
    scaled.until_noted("the policy stays as it was")
    assert scaled.workers() == BASE
    scaled.allow(1)
    shown = json.loads(scaled.record.model_dump_json())
    assert {pool["pool"] for pool in shown["pools"]} == {"prefill", "decode"}
