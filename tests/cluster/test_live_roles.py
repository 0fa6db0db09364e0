"""Workers whose roles change while they serve: at once, without a lost token, and every router agrees."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import moving
import pytest
from live_cluster import Answer, LiveCluster, all_ready, greedy, is_idle, load_of
from model_zoo import first_disagreement, prompt
from proofs import operators_proof
from transformers import PreTrainedModel
from wired_cluster import HOST, Pools, WiredCluster, wired_cluster

from pdserve.launch.folder import free_port
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
WORKERS = (*PREFILLS, *DECODES)
PREFILL, DECODE, MIXED = link.ROLE_PREFILL, link.ROLE_DECODE, link.ROLE_MIXED
UNDER_LOAD = 250  # tokens of an answer
MODEL_SHAPE = moving.MODEL_SHAPE
FLAGS = {"dtype": "float32", "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Return the public and the internal port of a second router."""
    return free_port(HOST), free_port(HOST)


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory, ports: tuple[int, int]) -> Iterator[WiredCluster]:
    pools = Pools(PREFILLS, DECODES, more_routers=(f"{HOST}:{ports[1]}",))
    with wired_cluster(tmp_path_factory.mktemp("cluster"), model, pools, FLAGS) as cluster:
        cluster.wiring.start_router("router-1", *ports)
        yield cluster


@pytest.fixture
def cluster(shared: WiredCluster) -> Iterator[WiredCluster]:
    yield shared
    for roles in ({PREFILL: MIXED, DECODE: MIXED}, {PREFILL: PREFILL, DECODE: DECODE}):  # no pool is ever empty
        for name in WORKERS:
            set_role(shared, name, roles[PREFILL if name in PREFILLS else DECODE])
    shared.wait_for(lambda status: all_ready(len(WORKERS))(status) and is_idle(status), 20)


class SecondRouter:
    """The other router, as its operator and its clients see it."""

    def __init__(self, cluster: LiveCluster, ports: tuple[int, int]) -> None:
        self._secret_file = cluster.state.secret_file
        self._channel = grpc.insecure_channel(f"{HOST}:{ports[1]}")
        self._admin = AdminServiceStub(self._channel)
        self._public = grpc.insecure_channel(f"{HOST}:{ports[0]}")
        self.inference = InferenceServiceStub(self._public)

    def until(self, wanted: Callable[[admin.ClusterStatus], bool], timeout_s: float) -> admin.ClusterStatus:
        """Return the first status that is as wanted."""
        proof = operators_proof(self._channel, self._secret_file, "WatchStatus", timeout_s)
        updates = self._admin.WatchStatus(admin.WatchStatusRequest(), metadata=proof, timeout=timeout_s)
        return next(update.status for update in updates if wanted(update.status))


@pytest.fixture(scope="module")
def second(shared: WiredCluster, ports: tuple[int, int]) -> SecondRouter:
    second = SecondRouter(shared, ports)
    second.until(all_ready(len(WORKERS)), 60)
    return second


def set_role(cluster: LiveCluster, name: str, role: int) -> int:
    """Give a worker a role; return its epoch."""
    request = admin.SetWorkerRoleRequest(worker_id=name, role=link.Role.ValueType(role))
    return cluster.admin.SetWorkerRole(request, metadata=cluster.proof("SetWorkerRole", 10), timeout=10).epoch


def role_of(status: admin.ClusterStatus, name: str) -> tuple[int, int]:
    """Return the role that a worker last reported, and its epoch."""
    (load,) = (worker.load for worker in status.workers if worker.registration.worker_id == name)
    return load.role, load.role_epoch


def ask(stub: InferenceServiceStub, length: int, seed: object, num_tokens: int = 20) -> inference.Ledger:
    replies = list(stub.Generate(greedy(prompt(length, seed), num_tokens), timeout=60))
    return replies[-1].ledger


def test_what_is_placed_follows_the_roles_on_both_routers(cluster: WiredCluster, second: SecondRouter) -> None:
    set_role(cluster, "decode-1", PREFILL)
    epoch = set_role(cluster, "prefill-0", DECODE)
    set_role(cluster, "prefill-1", DECODE)
    set_role(cluster, "decode-0", PREFILL)
    second.until(lambda status: role_of(status, "prefill-0") == (DECODE, epoch), 5)
    taken = {"prefill-1": DECODE, "decode-0": PREFILL, "decode-1": PREFILL}
    second.until(lambda status: all(role_of(status, name)[0] == role for name, role in taken.items()), 5)
    for number in range(4):
        for stub in (cluster.inference, second.inference):
            ledger = ask(stub, 60, f"follows {number}")
            assert ledger.prefill_worker in DECODES
            assert ledger.decode_worker in PREFILLS
            assert ledger.attempts == 1


def test_roles_flip_under_load_and_no_answer_notices(cluster: WiredCluster, oracle: PreTrainedModel) -> None:
    asked = [prompt(30 + 20 * number, f"load {number}") for number in range(8)]
    flips = [
        ("decode-0", MIXED),
        ("prefill-0", MIXED),
        ("decode-1", PREFILL),
        ("prefill-1", DECODE),
        ("decode-0", PREFILL),
        ("prefill-0", DECODE),
    ]
    before = cluster.status()
    calls = [cluster.start(greedy(each, UNDER_LOAD)) for each in asked]
    answers = [Answer() for _ in calls]
    for call, answer in zip(calls, answers, strict=True):
        while not answer.tokens:
            answer.add(next(call))
    for name, role in flips:
        set_role(cluster, name, role)
        if role == PREFILL:  # what it decodes leaves it
            cluster.wait_for(lambda status, n=name: load_of(status, n).num_running == 0, 20)
    for call, each, answer in zip(calls, asked, answers, strict=True):
        answer.read(call)
        assert len(answer.tokens[0]) == UNDER_LOAD
        assert first_disagreement(oracle, each, answer.tokens[0]) is None
        assert answer.ledger.attempts == 1
    assert moving.num_moved(cluster.status()) > moving.num_moved(before)
