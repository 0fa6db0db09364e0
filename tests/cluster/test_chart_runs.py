"""The manifests that the chart renders make a cluster that serves through what happens to pods.

Every container's command runs with the volumes, names and probes of its manifest; only images and nodes are missing.
"""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from helm_chart import NAMESPACE, Manifest, of_kind, rendered
from kubelet import Kubelet, Pod, kubelet, skip_without_namespaces
from live_cluster import Answer, greedy
from model_zoo import VOCAB, first_disagreement
from transformers import PreTrainedModel

from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

PROMPTS = [[3 + (7 * number + 11 * place) % (VOCAB - 3) for place in range(20 + 30 * number)] for number in range(4)]
NUM_TOKENS = 64
SERVICE = f"chat-pdserve.{NAMESPACE}.svc"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Cluster:
    """A cluster of the chart, as its operator and its clients see it."""

    def __init__(self, node: Kubelet) -> None:
        self.node = node
        secrets = of_kind(node.manifests, "Secret")
        self._key = secrets["chat-pdserve-keys"]["stringData"]["key"]
        self._authority = base64.b64decode(secrets["chat-pdserve-tls"]["data"]["ca.crt"])
        self._channels: dict[str, grpc.Channel] = {}

    def pod(self, component: str) -> Pod:
        return next(pod for pod in self.node.pods if pod.component == component and not pod.going)

    def roll(self, component: str) -> None:
        """Restart a Deployment's only pod as an upgrade does: the successor is ready first."""
        old = self.pod(component)
        self.node.until_ready(self.node.deploy(f"chat-pdserve-{component}"))
        assert self.node.delete(old) == 0, old.log

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


@pytest.fixture(scope="module")
def manifests(model: Path) -> list[Manifest]:
    """The chart's values for a laptop, with a small model in place of SmolLM2."""
    given = {"model.source": "builtIn", "model.path": str(model), "workers.config.dtype": "float32"}
    return rendered({**given, "tls.public.from": "chart"}, "laptop")


@pytest.fixture(scope="module")
def cluster(manifests: list[Manifest], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    skip_without_namespaces()
    with kubelet(manifests, tmp_path_factory.mktemp("node")) as node:
        running = Cluster(node)
        node.until_ready(*(node.deploy(f"chat-pdserve-{each}") for each in ("router", "prefill", "decode")))
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
    for component in ("router", "prefill", "decode"):
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        assert [cluster.pod(component).holds(probe) for probe in probes] == [True, True, True]


def test_a_pod_deleted_without_grace_and_one_rolled_cost_no_client_an_error(
    cluster: Cluster, oracle: PreTrainedModel
) -> None:
    with cluster.asked_all_the_time(oracle) as answered:
        cluster.node.until(lambda: len(answered) >= 4, "clients are served")
        lost = cluster.pod("decode")
        cluster.node.delete(lost, grace=False)
        cluster.node.until_ready(cluster.node.deploy("chat-pdserve-decode"))
        seen = len(answered)
        cluster.roll("decode")
        cluster.node.until(lambda: len(answered) >= seen + 4, "clients are served by the successor")


@pytest.mark.long
def test_an_upgrade_of_every_pod_costs_no_client_an_error(cluster: Cluster, oracle: PreTrainedModel) -> None:
    with cluster.asked_all_the_time(oracle) as answered:
        for component in ("prefill", "decode", "router"):
            seen = len(answered)
            cluster.roll(component)
            cluster.node.until(lambda seen=seen: len(answered) >= seen + 4, f"clients are served after {component}")  # type: ignore[misc]
