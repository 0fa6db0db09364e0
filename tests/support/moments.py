"""A stream held at a moment of its life: before, during or after the transfer of its prompt's pages.

A moment lasts until the test lets go of it, however fast or slow the machine is.
"""

import random
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
from live_cluster import Answer, greedy, load_of
from model_zoo import VOCAB, first_disagreement
from transformers import PreTrainedModel
from wired_cluster import WiredCluster

from pdserve.proto.v1 import admin_pb2 as admin

PAGE_SIZE = 16
PROMPT = 400  # tokens, 25 MiB of KV: more than the sockets between two workers hold
PROMPT_PAGES = PROMPT // PAGE_SIZE
NUM_TOKENS = 150
FAT_KV = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
WORKER_FLAGS = {
    "dtype": "float32",
    "page_size": PAGE_SIZE,
    "num_pages": 80,
    "max_model_len": 600,
    "handoff_transport": "tcp",  # writes need the receiver's help: one that is frozen holds them up
}
ROUTER_FLAGS = {"worker_silence_s": 5.0}  # freezing workers to hold a moment must not cost them their place
STATUS_WITHIN_S = 5


@dataclass
class Scene:
    """One stream at a moment of its life, and which workers are frozen to keep it there."""

    cluster: WiredCluster
    asked: list[int]
    answer: Answer = field(default_factory=Answer)
    frozen: dict[str, ExitStack] = field(default_factory=dict)  # by name
    servers: dict[str, str] = field(default_factory=dict)  # by role
    _call: grpc.Call | None = None

    @classmethod
    def of(cls, cluster: WiredCluster, seed: object) -> "Scene":
        rng = random.Random(str(seed))
        return cls(cluster, [rng.randrange(3, VOCAB) for _ in range(PROMPT)])

    def freeze(self, *names: str) -> None:
        for name in names:
            self.frozen[name] = ExitStack()
            self.frozen[name].enter_context(self.cluster.frozen(name))

    def thaw(self, *names: str) -> None:
        for name in names:
            self.frozen.pop(name).close()

    def let_go(self, but: str = "") -> None:
        """Thaw all that keeps the stream where it is, except for one worker."""
        self.thaw(*(name for name in self.frozen if name != but))

    def begin(self) -> None:
        """Send the request."""
        self._call = self.cluster.start(greedy(self.asked, NUM_TOKENS))

    def read(self, count: int) -> None:
        """Read until there are so many tokens."""
        assert self._call is not None
        while len(self.answer.tokens.get(0, ())) < count:
            self.answer.add(next(self._call))

    def find_servers(self, status: admin.ClusterStatus) -> None:
        prefill, decode = (self._serving(status, names) for names in (self._prefills, self._decodes))
        self.servers = {"prefill": prefill, "decode": decode, "router": "router"}

    def granted(self, status: admin.ClusterStatus) -> bool:
        return any(load_of(status, name).pages_granted for name in self._decodes)

    def assert_right(self, oracle: PreTrainedModel) -> None:
        """Read to the end: every token is there, once, and the oracle's."""
        assert self._call is not None
        self.answer.read(self._call)
        assert len(self.answer.tokens[0]) == NUM_TOKENS
        assert first_disagreement(oracle, self.asked, self.answer.tokens[0]) is None

    @property
    def _prefills(self) -> tuple[str, ...]:
        return self.cluster.pools.prefills

    @property
    def _decodes(self) -> tuple[str, ...]:
        return self.cluster.pools.decodes

    def _serving(self, status: admin.ClusterStatus, names: tuple[str, ...]) -> str:
        busy = (w.registration.worker_id for w in status.workers if w.num_assigned)
        return next((name for name in busy if name in names), "")


def before(scene: Scene) -> None:
    """Both workers have been told, and the prefill worker has yet to begin."""
    scene.freeze(*scene.cluster.pools.prefills)
    scene.begin()
    scene.find_servers(scene.cluster.wait_for(scene.granted, STATUS_WITHIN_S))


def during(scene: Scene) -> None:
    """Pages are on their way to a worker that does not read them. Needs lanes over TCP."""
    before(scene)
    prefills = tuple(scene.frozen)
    scene.freeze(scene.servers["decode"])
    scene.thaw(*prefills)
    scene.read(1)


def after(scene: Scene) -> None:
    """The decode worker streams."""
    during(scene)
    scene.thaw(scene.servers["decode"])
    scene.read(8)


MOMENTS = {"before": before, "during": during, "after": after}
