"""The manifests that the chart renders make a cluster that serves through what happens to pods.

Every container's command runs with the volumes, names and probes of its manifest; only images and nodes are missing.
"""

import asyncio
import base64
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from helm_chart import NAMESPACE, Manifest, of_kind, rendered
from kube_node import KubeNode, kube_node
from kubelet import Pod, skip_without_namespaces
from live_cluster import Answer, greedy
from model_zoo import VOCAB, first_disagreement
from transformers import PreTrainedModel

from pdserve.autoscaler.actuators import KubernetesActuator, ScaleTarget
from pdserve.autoscaler.kubernetes import PodActuator
from pdserve.autoscaler.observation import State
from pdserve.kubernetes.client import Client
from pdserve.launch.admin import AdminClient
from pdserve.launch.authority import write_certificates
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.roles import Role

PROMPTS = [[3 + (7 * number + 11 * place) % (VOCAB - 3) for place in range(20 + 30 * number)] for number in range(4)]
NUM_TOKENS = 64
SERVICE = f"chat-pdserve.{NAMESPACE}.svc"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Cluster:
    """A cluster of the chart, as its operator and its clients see it."""

    def __init__(self, kube: KubeNode, identity: Path) -> None:
        """`identity`: of an operator."""
        self.kube, self.node, self._identity = kube, kube.node, identity
        secrets = of_kind(kube.node.manifests, "Secret")
        self._key = secrets["chat-pdserve-keys"]["stringData"]["key"]
        self._authority = base64.b64decode(secrets["chat-pdserve-tls"]["data"]["ca.crt"])
        self._channels: dict[str, grpc.Channel] = {}

    def pod(self, component: str) -> Pod:
        (pod,) = self.kube.pods(component)
        return pod

    def replace(self, component: str) -> None:
        """Replace a Deployment's only pod as an upgrade does: the successor is ready first."""
        old, name = self.pod(component), f"chat-pdserve-{component}"
        self.kube.scale(name, 2)
        self.node.until(lambda: self.kube.num_ready(component) == 2, "there is a successor that is ready")
        self.kube.retire(old, name)
        self.node.until(lambda: self.kube.is_gone(old), f"{old.name} has ended")
        assert self.kube.status_of(old) == 0, old.log

    def operator(self) -> AdminClient:
        """Return a connection to the router's internal port, with an operator's certificate."""
        router = self.pod("router")
        return AdminClient(f"{router.address}:50052", router.folder / "secret" / "secret", self._identity)

    def num_quarantined(self) -> int:
        """Return how many pages of all workers wait for proof that a peer has ended."""

        async def ask() -> int:
            async with self.operator() as client:
                return sum(worker.load.pages_quarantined for worker in (await client.status()).workers)

        return asyncio.run(ask())

    def ask(self, prompt: list[int]) -> list[int]:
        """Return the tokens of an answer, each the likeliest."""
        metadata = (("authorization", f"Bearer {self._key}"),)
        call = self._stub().Generate(greedy(prompt, NUM_TOKENS), timeout=60, metadata=metadata)
        return Answer().read(call).tokens[0]

    def _stub(self) -> InferenceServiceStub:
        """Connect to a pod of the public service, as its clients' node would choose one."""
        (address, *_) = self.node.addresses("chat-pdserve")
        if address not in self._channels:
            shown = grpc.ssl_channel_credentials(self._authority)
            options = (("grpc.ssl_target_name_override", SERVICE),)
            self._channels[address] = grpc.secure_channel(f"{address}:50051", shown, options)
        return InferenceServiceStub(self._channels[address])

    @contextmanager
    def asked_all_the_time(self, oracle: PreTrainedModel) -> Iterator[list[int]]:
        """Ask for the length of the block, twice at once; yield which prompts were answered, in order.

        Each answer must be the oracle's, and none may fail.
        """
        over, answers = threading.Event(), list[tuple[int, list[int]]]()
        answered = list[int]()

        def client(turn: int) -> None:
            while not over.is_set():
                number = turn % len(PROMPTS)
                answers.append((number, self.ask(PROMPTS[number])))
                answered.append(number)
                turn += 1

        with ThreadPoolExecutor(2) as pool:
            clients: list[Future[None]] = [pool.submit(client, offset) for offset in range(2)]
            try:
                yield answered
            finally:
                over.set()
                for each in clients:
                    each.result()  # what a client met says more than what was waited for in vain
        for number, tokens in {(number, tuple(tokens)) for number, tokens in answers}:
            assert len(tokens) == NUM_TOKENS
            assert first_disagreement(oracle, PROMPTS[number], tokens) is None

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def secret_of(name: str, folder: Path) -> Manifest:
    """Return a secret with the files of a folder."""
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The chart's values for a laptop, with a small model in place of SmolLM2, and certificates for all that speak."""
    skip_without_namespaces()
    folder = tmp_path_factory.mktemp("node")
    certificates, kubeconfig = folder / "certificates", folder / "kubeconfig"
    write_certificates(certificates, (), 1)
    given = {
        "model": {"path": str(model), "source": "builtIn"},
        "workers.config.dtype": "float32",
        "operator.extraEnv": [{"name": "KUBECONFIG", "value": str(kubeconfig)}],
        "tls.public.from": "chart",
        "tls.identity": {
            "from": "secret",
            "existingSecrets": {part: part for part in ("router", "worker", "operator")},
        },
    }
    identities = [secret_of(name, certificates / name) for name in ("router", "worker", "operator")]
    with kube_node([*rendered(given, "laptop"), *identities], folder / "pods", kubeconfig) as kube:
        running = Cluster(kube, certificates / "operator")
        kube.deploy()
        kube.node.until(lambda: len(kube.node.pods) == 4, "all pods are made")
        kube.node.until_ready(*kube.node.pods)
        try:
            yield running
        finally:
            running.close()


def test_helm_test_asks_a_question_and_gets_an_answer(cluster: Cluster) -> None:
    (test,) = of_kind(cluster.node.manifests, "Pod").values()
    pod = cluster.node.run("chat-pdserve-test", "test", test["spec"])
    assert pod.process is not None
    assert pod.process.wait(60) == 0, pod.log
    assert "prefill" in pod.log  # where the time of an answer went


def test_probes_say_what_the_pod_is_at(cluster: Cluster) -> None:
    for component in ("router", "prefill", "decode", "autoscaler"):
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        assert [cluster.pod(component).holds(probe) for probe in probes] == [True, True, True]


def test_a_pod_deleted_without_grace_and_one_replaced_cost_no_client_an_error(
    cluster: Cluster, oracle: PreTrainedModel
) -> None:
    node = cluster.node
    with cluster.asked_all_the_time(oracle) as answered:
        node.until(lambda: len(answered) >= 4, "clients are served")
        lost = cluster.pod("decode")
        cluster.kube.delete(lost, grace=False)
        node.until(lambda: f"{lost.name}, process" in cluster.pod("autoscaler").log, "the watcher reports the end")
        node.until(lambda: cluster.kube.num_ready("decode") == 1, "there is a successor that is ready")
        seen = len(answered)
        cluster.replace("decode")
        node.until(lambda: len(answered) >= seen + 4, "clients are served by the successor")
        node.until(lambda: cluster.num_quarantined() == 0, "no page is in quarantine, if any ever was")


@pytest.mark.long
def test_an_upgrade_of_every_pod_costs_no_client_an_error(cluster: Cluster, oracle: PreTrainedModel) -> None:
    with cluster.asked_all_the_time(oracle) as answered:
        for component in ("prefill", "decode", "router"):
            seen = len(answered)
            cluster.replace(component)
            cluster.node.until(lambda seen=seen: len(answered) >= seen + 4, f"clients are served after {component}")  # type: ignore[misc]


@pytest.mark.long
def test_the_actuator_adds_a_replica_and_drains_one_while_clients_ask(
    cluster: Cluster, oracle: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kube.kubeconfig))
    first = cluster.pod("decode")
    with cluster.asked_all_the_time(oracle) as answered:
        asyncio.run(_grow_and_shrink(cluster))
        seen = len(answered)
        cluster.node.until(lambda: len(answered) >= seen + 4, "clients are served by the replica that was added")
    assert cluster.kube.status_of(first) == 0, first.log


async def _grow_and_shrink(cluster: Cluster) -> None:
    """Add a decode worker through the scale subresource, then drain the one that was there before."""
    prefill, decode = (ScaleTarget(name=f"chat-pdserve-{pool}") for pool in ("prefill", "decode"))
    settings = KubernetesActuator(namespace=NAMESPACE, prefill=prefill, decode=decode)
    async with Client() as client, cluster.operator() as router, asyncio.timeout(120):
        actuator = PodActuator(client, router, settings)

        async def decoding() -> dict[str, State]:
            return {held.name: held.state for held in await actuator.observe() if held.role is Role.DECODE}

        (old,) = await decoding()
        await actuator.add("decode-added", Role.DECODE)
        while [*(await decoding()).values()] != [State.READY, State.READY]:
            pass  # each look is a few requests to the API
        await actuator.drain(old)
        while old in await decoding():
            pass
