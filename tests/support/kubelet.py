"""Runs the pods of rendered manifests as processes of this machine: their commands, volumes, names and probes.

Each container is process 1 of namespaces of its own, as a user without rights, on a read-only root; a pod's address is
one of 127.0.0.0/8. Services are names in /etc/hosts, kept as probes say.
"""

import base64
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from helm_chart import NAMESPACE, Manifest, of_kind

SANDBOX = Path(__file__).with_name("pod_sandbox.sh")
UNSHARE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--pid",
    "--ipc",
    "--fork",
    "--mount-proc",
    "--kill-child",
)
ANOTHER_OWNER = 1
START_S = 120


def skip_without_namespaces() -> None:
    """Skip a test where this machine has no means to run containers' commands apart."""
    probe = [*UNSHARE, "sh", "-c", "mount -t tmpfs none /mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("needs user, mount and process namespaces for unprivileged users")


@dataclass(eq=False)
class Pod:
    """A pod that runs, or has run."""

    name: str
    component: str
    address: str
    spec: Manifest
    folder: Path
    uid: str
    ready: bool = False
    going: bool = False
    process: "subprocess.Popen[bytes] | None" = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        found: Manifest = container
        return found

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def holds(self, probe: str) -> bool:
        """Return whether one of the container's probes holds, as its node would ask."""
        asked = self.container[probe]
        with grpc.insecure_channel(f"{self.address}:{asked['grpc']['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=asked["grpc"]["service"])
            try:
                reply = HealthStub(channel).Check(request, timeout=asked.get("timeoutSeconds", 1))
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def end(self, grace: bool) -> int:
        """End the container as its node would, and return its exit status."""
        assert self.process is not None
        self.going, self.ready = True, False
        children = psutil.Process(self.process.pid).children()
        if grace:
            sleep_s = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            time.sleep(sleep_s)  # what the manifest asks the node for
            for child in children:
                child.terminate()
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(self.spec["terminationGracePeriodSeconds"] - sleep_s)
        self.process.kill()
        return self.process.wait()


class Kubelet:
    """The node, and what the control plane does for Deployments and Services, where a test asks for it."""

    def __init__(self, manifests: list[Manifest], folder: Path, network: str) -> None:
        """`network`: the first three bytes of the pods' addresses."""
        self.manifests = manifests
        self.pods: list[Pod] = []
        self._folder, self._network = folder, network
        folder.mkdir(exist_ok=True)
        self._hosts = folder / "hosts"
        self._hosts.write_text("")
        self._ended = threading.Event()
        self._prober = threading.Thread(target=self._probe, daemon=True)
        self._prober.start()

    # ---- what a test does

    def run(
        self, name: str, component: str, spec: Manifest, uid: str = "", labels: Mapping[str, str] | None = None
    ) -> Pod:
        """Start a pod. Services choose it by its labels."""
        folder = self._folder / name
        folder.mkdir()
        address = f"{self._network}.{len(self.pods) + 1}"
        pod = Pod(name, component, address, spec, folder, uid, labels=labels or {})
        self.pods.append(pod)
        self._name_services()
        self._start(pod)
        return pod

    def until(self, holds: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        """Wait until something holds of the pods, which are looked at as often as they are probed."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
            self._ended.wait(0.05)

    def until_ready(self, *pods: Pod) -> None:
        self.until(lambda: all(pod.ready for pod in pods), f"{[pod.name for pod in pods]} are ready")

    def delete(self, pod: Pod, *, grace: bool = True) -> int:
        """End a pod and return its exit status; Services lose it first."""
        pod.going = True
        self._name_services()
        return pod.end(grace)

    def addresses(self, service: str) -> list[str]:
        """Return the addresses of the pods that a Service chooses."""
        spec = of_kind(self.manifests, "Service")[service]["spec"]
        also_unready = spec.get("publishNotReadyAddresses", False)
        live = (pod for pod in self.pods if not (pod.process is not None and pod.process.poll() is not None))
        return [
            pod.address
            for pod in live
            if spec["selector"].items() <= pod.labels.items() and (also_unready or (pod.ready and not pod.going))
        ]

    def close(self) -> None:
        self._ended.set()
        self._prober.join()
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.end(grace=False)

    # ---- what a node does

    def _probe(self) -> None:
        """Probe each pod: for its start, then for its readiness."""
        while not self._ended.wait(0.2):
            for pod in [*self.pods]:
                ready = not pod.going and pod.process is not None and pod.process.poll() is None
                if "readinessProbe" in pod.container:
                    ready = ready and pod.holds("readinessProbe")
                if ready != pod.ready and not pod.going:
                    pod.ready = ready
                    self._name_services()

    def _name_services(self) -> None:
        lines = ["127.0.0.1 localhost"]
        for name in of_kind(self.manifests, "Service"):
            lines += [f"{address} {name}.{NAMESPACE}.svc" for address in self.addresses(name)]
        self._hosts.write_text("\n".join(lines) + "\n")  # in place: the file is mounted

    def _start(self, pod: Pod) -> None:
        container = pod.container
        last_words = pod.folder / "termination-log"
        last_words.touch()
        mounts = [f"{self._hosts} /etc/hosts", f"{last_words} /dev/termination-log"]
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for mount in container["volumeMounts"]:
            source = self._volume(pod, volumes[mount["name"]])
            if source is not None and mount["mountPath"] != "/dev/shm":
                mounts.append(f"{source / mount.get('subPath', '')} {mount['mountPath']}")
        (pod.folder / "mounts").write_text("\n".join(mounts) + "\n")
        scratch = pod.folder / "scratch"
        scratch.mkdir()
        environment = {each["name"]: _value(self.manifests, pod, each) for each in container.get("env", [])}
        command = [_expand(word, environment) for word in (*container["command"], *container.get("args", []))]
        command[0] = str(Path(sys.executable).with_name(command[0]))
        user = str(pod.spec["securityContext"]["runAsUser"])
        of_the_image = {"PATH": os.environ["PATH"], "HOME": "/var/cache/pdserve", "TMPDIR": "/var/cache/pdserve"}
        with (pod.folder / "log").open("wb") as log:
            pod.process = subprocess.Popen(
                [*UNSHARE, "sh", str(SANDBOX), str(scratch), str(pod.folder / "mounts"), user, *command],
                env={**of_the_image, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def _volume(self, pod: Pod, volume: Manifest) -> Path | None:
        """Return the folder with a volume's files; None for the one that the sandbox has already."""
        folder = pod.folder / volume["name"]
        if "configMap" in volume:
            folder.mkdir()
            for key, text in of_kind(self.manifests, "ConfigMap")[volume["configMap"]["name"]]["data"].items():
                (folder / key).write_text(text, encoding="utf-8")
            return folder
        if "secret" in volume:
            folder.mkdir()
            secret = of_kind(self.manifests, "Secret")[volume["secret"]["secretName"]]
            content = {key: base64.b64decode(text) for key, text in secret.get("data", {}).items()}
            content |= {key: text.encode() for key, text in secret.get("stringData", {}).items()}
            wanted = {each["key"]: each["path"] for each in volume["secret"].get("items", [])}
            for key, data in content.items():
                if not wanted or key in wanted:
                    _write_secret(folder / wanted.get(key, key), data, volume["secret"]["defaultMode"])
            return folder
        return None


@contextmanager
def kubelet(manifests: list[Manifest], folder: Path) -> Iterator[Kubelet]:
    """Run pods of manifests for the length of the block; nothing is started by itself."""
    network = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}"
    running = Kubelet(manifests, folder, network)
    try:
        yield running
    finally:
        running.close()


def _write_secret(path: Path, data: bytes, mode: int) -> None:
    """Write a file as Kubernetes mounts a secret: for the pod's group, and of another owner where this user is root."""
    path.write_bytes(data)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, ANOTHER_OWNER, 0)


def _value(manifests: list[Manifest], pod: Pod, variable: Manifest) -> str:
    match variable:
        case {"value": value}:
            return str(value)
        case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
            return str(of_kind(manifests, "Secret")[name]["stringData"][key])
    fields = {"metadata.name": pod.name, "metadata.uid": pod.uid, "metadata.namespace": NAMESPACE}
    return (fields | {"status.podIP": pod.address})[variable["valueFrom"]["fieldRef"]["fieldPath"]]


def _expand(word: str, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        word = word.replace(f"$({name})", value)
    return word
