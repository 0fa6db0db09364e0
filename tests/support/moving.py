"""A stream that runs on one decode worker of two, and what moves it to the other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from fault_proxy import Direction, FaultProxy
from live_cluster import Answer, LiveCluster, greedy, is_idle, load_of
from model_zoo import assert_right, load_oracle, prompt, write_model
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1 import inference_pb2 as inference

POOLS = Pools(("prefill-0",), ("decode-0", "decode-1"))
WORKER_FLAGS = {"dtype": "float32", "max_num_batched_tokens": 128, "num_pages": 600, "max_model_len": 2400}
MODEL_SHAPE = {"hidden_size": 512, "intermediate_size": 1280, "num_hidden_layers": 8, "num_attention_heads": 8}
NUM_BEFORE = 40  # tokens that an answer has when it moves
MOVED_WITHIN_S = 20
MAX_ROUNDS = 8
LONG = 700  # tokens of an answer that outlives what a test does

# Stages of a move, each with the message that is held back while it lasts: the way it goes, seen from who sends pages.
STAGES: dict[str, tuple[Direction, str]] = {
    "before the grant": ("back", "grant"),
    "while pages are copied": ("onward", "landed"),
    "after the cut": ("onward", "commit"),
    "after the commit": ("back", "taken"),
}
_MESSAGES = {"onward": handoff.HandoffServiceAttachRequest, "back": handoff.HandoffServiceAttachResponse}


def is_message(direction: Direction, kind: str) -> Callable[[bytes], bool]:
    """Return whether a message of a hand-off stream is of a kind, or brings one that is."""

    def is_of_kind(data: bytes) -> bool:
        message = _MESSAGES[direction].FromString(data)
        return any(each.WhichOneof("message") == kind for each in (message, *message.more))

    return is_of_kind


def move(cluster: LiveCluster, source: str, target: str = "", count: int = 0) -> int:
    """Ask for moves off a worker; return how many are to move."""
    request = admin.MoveSequencesRequest(worker_id=source, target_worker_id=target, max_sequences=count)
    return cluster.admin.MoveSequences(request, metadata=cluster.proof("MoveSequences", 10), timeout=10).num_sequences


def num_moved(status: admin.ClusterStatus) -> int:
    return status.moves["done"]


def num_tried(status: admin.ClusterStatus) -> int:
    return sum(status.moves.values())


def introduce(cluster: WiredCluster) -> None:
    """Have each decode worker meet the other: each dials on first need, which takes longer than a short answer."""
    for number in range(MAX_ROUNDS):
        if all(cluster.has_met(*pair) for pair in (POOLS.decodes, POOLS.decodes[::-1])):
            return
        running = Running.of(cluster, long_answer(f"introduction {number}")[1])
        for pair in ((running.source, running.target), (running.target, running.source)):
            before = cluster.status()
            if move(cluster, *pair):
                cluster.wait_for(lambda status, b=before: num_tried(status) > num_tried(b), MOVED_WITHIN_S)
        running.call.cancel()
    raise AssertionError("some workers never meet")


@dataclass
class Running:
    """An answer on its way, and where it runs."""

    cluster: WiredCluster
    call: grpc.Call
    source: str
    target: str
    before: admin.ClusterStatus
    answer: Answer = field(default_factory=Answer)

    @classmethod
    def of(cls, cluster: WiredCluster, request: inference.GenerateRequest) -> "Running":
        """Send a request, and return once its answer is well under way."""
        before, call, answer = cluster.status(), cluster.start(request), Answer()
        while sum(map(len, answer.tokens.values())) < NUM_BEFORE:
            answer.add(next(call))
        status = cluster.wait_for(lambda status: any(load_of(status, name).num_running for name in POOLS.decodes), 5)
        source = next(name for name in POOLS.decodes if load_of(status, name).num_running)
        (target,) = set(POOLS.decodes) - {source}
        return cls(cluster, call, source, target, before, answer)

    @property
    def proxy(self) -> FaultProxy:
        """The path of the stream by which it moves."""
        return self.cluster.proxies[f"handoff {self.target}"]

    def move(self, count: int = 0) -> int:
        return move(self.cluster, self.source, self.target, count)

    def end(self) -> Answer:
        return self.answer.read(self.call)

    def num_replaced(self) -> int:
        """Return how often a request was placed again since this one was sent."""
        return self.cluster.status().num_replaced - self.before.num_replaced


def long_answer(seed: object, num_tokens: int = LONG) -> tuple[list[int], inference.GenerateRequest]:
    """Return a prompt of some pages and a greedy request for a long answer."""
    asked = prompt(150, seed)
    return asked, greedy(asked, num_tokens)


def assert_an_answer_moves(
    folder: Path, own_flags: dict[str, dict[str, object]], model: Path | None = None, **flags: object
) -> None:
    """Move a running answer between decode workers with flags of their own; it is transformers' to its end."""
    model = model or write_model("llama3", folder / "model", **MODEL_SHAPE)
    with wired_cluster(folder, model, POOLS, {**WORKER_FLAGS, **flags}, own_flags=own_flags) as cluster:
        cluster.introduce()
        introduce(cluster)
        asked, request = long_answer("between unlike workers")
        running = Running.of(cluster, request)
        assert running.move() == 1
        cluster.wait_for(lambda status: num_moved(status) > num_moved(running.before), 20)
        answer = running.end()
        cluster.wait_for(is_idle, 5)
    assert answer.ledger.decode_worker == running.target
    assert_right(load_oracle(model), asked, answer.tokens[0], LONG)
