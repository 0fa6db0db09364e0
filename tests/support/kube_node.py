"""A cluster of Kubernetes on this machine: the double of its API server, its controllers, and a node that runs pods.

Everything but the node's own work goes through the API, from a thread of its own.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TypeVar

from helm_chart import NAMESPACE, Manifest, of_kind
from kube_account import write_kubeconfig
from kube_api import Json, KubeApi, merge
from kube_deployments import COST, Deployments
from kubelet import Kubelet, Pod, kubelet

SYNC_S = 0.1
HERE = "pdserve.test/node"  # the finalizer of pods whose process has not ended yet

_T = TypeVar("_T")


class KubeNode:
    """Runs what the API server's pods say, and shows there what becomes of it."""

    def __init__(self, node: Kubelet, kubeconfig: Path) -> None:
        self.node = node
        self.kubeconfig = kubeconfig
        self._pods: dict[str, Pod] = {}  # by uid
        self._ending: dict[str, Future[int]] = {}
        self._started, self._over = threading.Event(), threading.Event()
        self._workers = ThreadPoolExecutor(8)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    # ---- what an operator does

    def deploy(self) -> None:
        """Make all deployments of the manifests, and the policy where it is a resource."""
        for kind, resource in (("AutoscalingPolicy", "autoscalingpolicies"), ("Deployment", "deployments")):
            for item in of_kind(self.node.manifests, kind).values():
                if kind == "Deployment":
                    item["spec"].setdefault("replicas", 1)
                self._do(lambda resource=resource, item=item: self._api.create(resource, NAMESPACE, item))  # type: ignore[misc]

    def find(self, resource: str, name: str) -> Json:
        """Return an object as the API shows it."""
        return self._do(lambda: deepcopy(self._api.find(resource, NAMESPACE, name)))

    def patch(self, resource: str, name: str, changes: Json) -> None:
        """Merge changes into an object, as `kubectl patch` does."""

        def change() -> None:
            item = self._api.find(resource, NAMESPACE, name)
            merge(item, changes)
            item["metadata"]["generation"] += 1
            self._api.store(resource, item)

        self._do(change)

    def scale(self, name: str, replicas: int) -> None:
        self.patch("deployments", name, {"spec": {"replicas": replicas}})

    def event_reasons(self) -> set[str]:
        """Return the reasons of all events."""
        return self._do(lambda: {each["reason"] for each in self._api.items("events")})

    def retire(self, pod: Pod, name: str) -> None:
        """Make a Deployment smaller by one, of which this pod is the first to go."""

        def change() -> None:
            self._api.find("pods", NAMESPACE, pod.name)["metadata"].setdefault("annotations", {})[COST] = "-1"
            item = self._api.find("deployments", NAMESPACE, name)
            item["spec"]["replicas"] -= 1
            self._api.store("deployments", item)

        self._do(change)

    def delete(self, pod: Pod, *, grace: bool = True) -> None:
        """Delete a pod; without grace its processes get no signal but the last."""
        if not grace:
            self._ending[pod.uid] = self._workers.submit(self.node.delete, pod, grace=False)
        self._do(lambda: self._api.delete("pods", NAMESPACE, pod.name))

    def status_of(self, pod: Pod) -> int:
        """Return the exit status of a pod that is to end, once it has."""
        return self._ending[pod.uid].result(60)

    def num_ready(self, component: str) -> int:
        """Return how many pods of a component the API shows as ready."""
        selector = f"app.kubernetes.io/component={component}"
        ready = [{"type": "Ready", "status": "True"}]
        shown = self._do(lambda: [each["status"].get("conditions") for each in self._api.items("pods", "", selector)])
        return shown.count(ready)

    def is_gone(self, pod: Pod) -> bool:
        """Return whether a pod has ended and was removed."""
        return self._do(lambda: all(each["metadata"]["uid"] != pod.uid for each in self._api.items("pods")))

    def pods(self, component: str) -> list[Pod]:
        """Return the pods of a component that run and are not to end."""
        return [pod for pod in self._pods.values() if pod.component == component and not pod.going]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._workers.shutdown()

    def _do(self, work: Callable[[], _T]) -> _T:
        """Do something to the API's objects in its own thread."""

        async def run() -> _T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    # ---- what the node does

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with KubeApi().serving() as api:
            self._api = api
            Deployments(api)
            write_kubeconfig(self.kubeconfig, {"server": api.address}, NAMESPACE)
            self._started.set()
            while not self._over.is_set():
                for item in api.items("pods"):
                    self._sync(item)
                await asyncio.sleep(SYNC_S)

    def _sync(self, item: Json) -> None:
        meta, before = item["metadata"], str(item["status"])
        pod = self._pods.get(meta["uid"])
        if pod is None:
            meta["finalizers"] = [HERE]
            item["spec"]["nodeName"] = "node"
            component = meta["labels"]["app.kubernetes.io/component"]
            pod = self._pods[meta["uid"]] = self.node.run(
                meta["name"], component, item["spec"], meta["uid"], meta["labels"]
            )
        if "deletionTimestamp" in meta and pod.uid not in self._ending:
            self._ending[pod.uid] = self._workers.submit(self.node.delete, pod)
        item["status"] |= {"phase": "Running", "podIP": pod.address}
        item["status"]["conditions"] = [{"type": "Ready", "status": str(pod.ready and not pod.going)}]
        ending = self._ending.get(pod.uid)
        if ending is not None and ending.done() and "finalizers" in meta:
            message = (pod.folder / "termination-log").read_text(encoding="utf-8")
            ended = {
                "exitCode": 137 if ending.result() < 0 else ending.result(),
                "reason": "Completed",
                "message": message,
            }
            item["status"]["containerStatuses"] = [{"name": pod.component, "state": {"terminated": ended}}]
            self._api.store("pods", item)
            del meta["finalizers"]
            before = ""
        if str(item["status"]) != before:
            self._api.store("pods", item)


@contextmanager
def kube_node(manifests: list[Manifest], folder: Path, kubeconfig: Path) -> Iterator[KubeNode]:
    """Have a cluster for the length of the block, in which nothing is deployed yet."""
    with kubelet(manifests, folder) as node:
        running = KubeNode(node, kubeconfig)
        try:
            yield running
        finally:
            running.close()
