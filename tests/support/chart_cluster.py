"""A cluster of the chart on this machine, as its operator and its clients see it.

Every container's command runs with the volumes, names and probes of its manifest; only images and nodes are missing.
"""

import asyncio
import base64
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx2
from helm_chart import NAMESPACE, Manifest, of_kind, rendered
from kube_node import KubeNode, kube_node
from kubelet import Pod, skip_without_namespaces
from live_cluster import Answer, greedy
from model_zoo import VOCAB, first_disagreement
from transformers import PreTrainedModel

from pdserve.launch.authority import write_certificates
from pdserve.net.certificates import Part
from pdserve.net.operator_client import AdminClient
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

PROMPTS = [[3 + (7 * number + 11 * place) % (VOCAB - 3) for place in range(20 + 30 * number)] for number in range(4)]
NUM_TOKENS = 64
SERVICE = f"chat-pdserve.{NAMESPACE}.svc"


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

        status = asyncio.run(self.operator().status())
        return sum(worker.load.pages_quarantined for worker in status.workers)

    def ask(self, prompt: list[int], model: str = "") -> list[int]:
        """Return the tokens of an answer, each the likeliest."""
        metadata, asked = (("authorization", f"Bearer {self._key}"),), greedy(prompt, NUM_TOKENS)
        asked.model = model
        call = self._stub().Generate(asked, timeout=60, metadata=metadata)
        return Answer().read(call).tokens[0]

    def complete(self, prompt: list[int], key: str | None = None) -> httpx2.Response:
        """Ask over OpenAI's API, by default with the chart's key."""
        (address, *_) = self.node.addresses("chat-pdserve")
        context = ssl.create_default_context(cadata=self._authority.decode())
        with httpx2.Client(verify=context, timeout=60) as client:
            return client.post(
                f"https://{address}:8000/v1/completions",
                json={"model": "", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
                | {"return_token_ids": True},
                headers={"authorization": f"Bearer {key or self._key}"},
                extensions={"sni_hostname": SERVICE},
            )

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


@contextmanager
def chart_cluster(model: Path, folder: Path, values: Manifest) -> Iterator[Cluster]:
    """Run the chart's values for a laptop, with a model in place of SmolLM2, and certificates for all that speak.

    `values`: more of them, by dotted keys.
    """
    skip_without_namespaces()
    certificates, kubeconfig = folder / "certificates", folder / "kubeconfig"
    write_certificates(certificates, (), 1)
    given = {
        "model": {"path": str(model), "source": "builtIn"},
        "workers.config.dtype": "float32",
        "operator.extraEnv": [{"name": "KUBECONFIG", "value": str(kubeconfig)}],
        "tls.public.from": "chart",
        "tls.identity": {"from": "secret", "existingSecrets": {part: part for part in Part}},
        **values,
    }
    identities = [secret_of(name, certificates / name) for name in Part]
    with kube_node([*rendered(given, "laptop"), *identities], folder / "pods", kubeconfig) as kube:
        running = Cluster(kube, certificates / "operator")
        kube.deploy()
        deployments = of_kind(kube.node.manifests, "Deployment").values()
        num_pods = sum(each["spec"]["replicas"] for each in deployments)
        kube.node.until(lambda: len(kube.node.pods) == num_pods, "all pods are made")
        kube.node.until_ready(*kube.node.pods)
        try:
            yield running
        finally:
            running.close()
