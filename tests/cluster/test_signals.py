"""SIGKILL and SIGSTOP of each role, before, during and after a transfer: no token is lost or doubled, no page kept."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from fault_proxy import Faults
from live_cluster import Answer, all_ready, greedy, is_idle, load_of
from model_zoo import VOCAB, first_disagreement, load_oracle, write_model
from transformers import PreTrainedModel
from wired_cluster import Pools, WiredCluster, wired_cluster

from pdserve.proto.v1 import admin_pb2 as admin

PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
PAGE_SIZE = 16
PROMPT = 400  # tokens, 25 MiB of KV: more than the sockets between two workers hold
FAT_KV = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
NUM_TOKENS = 150
SILENT_FOR_S = 10  # at most, until a worker is given up


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama3", tmp_path_factory.mktemp("model") / "llama3", **FAT_KV)


@pytest.fixture(scope="module")
def oracle(model: Path) -> PreTrainedModel:
    return load_oracle(model)


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WiredCluster]:
    flags = {"dtype": "float32", "page_size": PAGE_SIZE, "num_pages": 80}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")  # writes need the receiver's help: one that is frozen holds them up
        folder, pools = tmp_path_factory.mktemp("cluster"), Pools(PREFILLS, DECODES)
        with wired_cluster(folder, model, pools, flags) as cluster:
            yield cluster


@pytest.fixture
def cluster(shared: WiredCluster) -> Iterator[WiredCluster]:
    shared.wait_for(is_well, 60)
    yield shared
    shared.wait_for(is_well, 60)


def is_well(status: admin.ClusterStatus) -> bool:
    return all_ready(4)(status) and is_idle(status)


@dataclass
class Scene:
    """One stream at a moment of its life, and what is frozen to keep it there."""

    cluster: WiredCluster
    asked: list[int]
    answer: Answer = field(default_factory=Answer)
    held: ExitStack = field(default_factory=ExitStack)
    call: grpc.Call | None = None
    frozen: str = ""
    servers: dict[str, str] = field(default_factory=dict)  # by role

    def begin(self) -> None:
        self.call = self.cluster.start(greedy(self.asked, NUM_TOKENS), timeout_s=60)

    def read(self, count: int) -> None:
        assert self.call is not None
        while len(self.answer.tokens.get(0, ())) < count:
            self.answer.add(next(self.call))

    def find_servers(self, status: admin.ClusterStatus) -> None:
        names = {w.registration.worker_id for w in status.workers if w.num_assigned}
        (prefill,), (decode,) = names & set(PREFILLS), names & set(DECODES)
        self.servers = {"prefill": prefill, "decode": decode, "router": "router"}

    def assert_right(self, oracle: PreTrainedModel) -> None:
        assert self.call is not None
        self.answer.read(self.call)
        assert len(self.answer.tokens[0]) == NUM_TOKENS
        assert first_disagreement(oracle, self.asked, self.answer.tokens[0]) is None


def serves(status: admin.ClusterStatus) -> bool:
    names = {w.registration.worker_id for w in status.workers if w.num_assigned}
    return bool(names & set(PREFILLS)) and bool(names & set(DECODES))


def before(scene: Scene) -> None:
    """The first token is out, and no grant has arrived."""
    for name in DECODES:
        scene.held.enter_context(scene.cluster.proxies[f"handoff {name}"].having(Faults(blackhole=True)))
    scene.begin()
    scene.find_servers(scene.cluster.wait_for(serves, 4))
    scene.read(1)


def during(scene: Scene) -> None:
    """Pages are on their way to a worker that does not read them."""
    with scene.cluster.frozen(*PREFILLS):
        scene.begin()
        granted = scene.cluster.wait_for(lambda s: any(load_of(s, d).pages_granted for d in DECODES), 4)
        scene.find_servers(granted)
    scene.frozen = scene.servers["decode"]
    scene.held.enter_context(scene.cluster.frozen(scene.frozen))
    scene.read(1)


def after(scene: Scene) -> None:
    """The decode worker streams."""
    scene.begin()
    scene.find_servers(scene.cluster.wait_for(serves, 4))
    scene.read(8)


MOMENTS = {"before": before, "during": during, "after": after}
Moment = Callable[[Scene], None]


@pytest.fixture(params=list(MOMENTS))
def moment(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def scene(cluster: WiredCluster, moment: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    rng = random.Random(request.node.name)
    scene = Scene(cluster, [rng.randrange(3, VOCAB) for _ in range(PROMPT)])
    with scene.held:
        MOMENTS[moment](scene)
        yield scene


def attempts_needed(role: str, moment: str) -> int:
    """A stream outlives the prefill worker that has handed it off."""
    return 1 if (role, moment) == ("prefill", "after") else 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_no_token(scene: Scene, oracle: PreTrainedModel, role: str, moment: str) -> None:
    victim = scene.servers[role]
    scene.cluster.kill(victim)
    scene.held.close()
    scene.cluster.report_gone(victim)
    scene.cluster.wiring.start_again(victim)
    scene.assert_right(oracle)
    assert scene.answer.ledger.attempts == attempts_needed(role, moment)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_frozen_until_it_is_given_up_costs_no_token_and_is_well_again_when_it_thaws(
    scene: Scene, oracle: PreTrainedModel, role: str, moment: str
) -> None:
    victim = scene.servers[role]
    with scene.cluster.frozen(victim):
        if scene.frozen != victim:
            scene.held.close()
        scene.assert_right(oracle)
        scene.cluster.wait_for(lambda s: all(w.registration.worker_id != victim for w in s.workers), SILENT_FOR_S)
    assert scene.answer.ledger.attempts == attempts_needed(role, moment)


def test_a_frozen_router_goes_on_where_it_was(scene: Scene, oracle: PreTrainedModel) -> None:
    with scene.cluster.frozen("router"):
        scene.held.close()
        channel = grpc.insecure_channel(scene.cluster.endpoint)
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(channel).result(timeout=0.5)
        channel.close()
    scene.assert_right(oracle)
    assert scene.answer.ledger.attempts == 1


def test_a_killed_router_ends_its_streams_and_its_workers_free_their_pages(
    scene: Scene, oracle: PreTrainedModel
) -> None:
    scene.cluster.kill("router")
    scene.held.close()
    with pytest.raises(grpc.RpcError) as ended:
        scene.assert_right(oracle)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    scene.cluster.wiring.start_again("router")
    scene.cluster.wait_for(is_well, 30)
    again = Scene(scene.cluster, scene.asked)
    again.begin()
    again.assert_right(oracle)
