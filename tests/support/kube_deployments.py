"""What controllers of Kubernetes do with deployments: pods are made, and removed in the order that is documented.

https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#scaling-down
"""

from copy import deepcopy

from kube_api import Json, KubeApi

COST = "controller.kubernetes.io/pod-deletion-cost"
PHASES = ("Pending", "Unknown", "Running")


class Deployments:
    """Acts after each change, unless it lags."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._acts = False
        self.lags = False
        api.changed.append(self.act)

    def act(self) -> None:
        if self._acts or self.lags:
            return
        self._acts = True
        try:
            for item in self._api.items("deployments"):
                self._reconcile(item)
        finally:
            self._acts = False

    def _reconcile(self, item: Json) -> None:
        pods, wanted = self._live(item), item["spec"]["replicas"]
        for _ in range(wanted - len(pods)):
            self._create(item)
        for pod in sorted(pods, key=rank)[: max(0, len(pods) - wanted)]:
            self._api.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        status = {"replicas": len(self._live(item))}
        if item.get("status") != status:
            item["status"] = status
            self._api.store("deployments", item)

    def _live(self, item: Json) -> list[Json]:
        labels = item["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = self._api.items("pods", item["metadata"]["namespace"], selector)
        return [
            pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ("Failed", "Succeeded")
        ]

    def _create(self, item: Json) -> None:
        template = deepcopy(item["spec"]["template"])
        meta = template["metadata"]
        meta["labels"] = {
            **meta["labels"],
            "pod-template-hash": template["metadata"].get("annotations", {}).get("v", "1"),
        }
        meta["generateName"] = f"{item['metadata']['name']}-"
        pod = {"metadata": meta, "spec": template["spec"], "status": {"phase": "Pending"}}
        self._api.create("pods", item["metadata"]["namespace"], pod)


def rank(pod: Json) -> tuple[bool, int, bool, int, str]:
    """Pods of the least rank are removed first."""
    meta = pod["metadata"]
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
    cost = int(meta.get("annotations", {}).get(COST, "0"))
    newest_first = "".join(chr(0x10FFFF - ord(each)) for each in meta["creationTimestamp"])
    return bool(pod["spec"].get("nodeName")), PHASES.index(pod["status"]["phase"]), ready, cost, newest_first
