"""The account of the chart's operator pod on a real API server, with the rights that the chart grants and no more.

The release is named so that the tests' workloads, Lease and policy have the names that its rights are for.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from helm_chart import CHART, Manifest, helm

NAME = "chat-autoscaler"
RELEASE = (
    "fullnameOverride=chat",
    "autoscaling.by=pdserve",
    "autoscaling.policyAs=AutoscalingPolicy",
    "tls.public.from=secret",
    "tls.public.existingSecret=public",
)

Ask = Callable[[str, str, Any], Awaitable[Any]]  # of a method, a path and a body, with the rights to make accounts


def manifests(namespace: str) -> list[Manifest]:
    """Return the account, its roles and their bindings."""
    given = [f"--set={value}" for value in RELEASE]
    command = ("template", "chat", str(CHART), f"--namespace={namespace}")
    documents = [each for each in yaml.safe_load_all(helm(*command, *given).stdout) if each]
    bindings = [each for each in documents if NAME in {subject["name"] for subject in each.get("subjects", ())}]
    accounts = [each for each in documents if each["kind"] == "ServiceAccount" and each["metadata"]["name"] == NAME]
    names = {(binding["roleRef"]["kind"], binding["roleRef"]["name"]) for binding in bindings}
    roles = [each for each in documents if (each["kind"], each["metadata"]["name"]) in names]
    return [*accounts, *roles, *bindings]


def path(manifest: Manifest) -> str:
    """Return the path of all objects of its kind."""
    version, namespace = manifest["apiVersion"], manifest["metadata"].get("namespace")
    base = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return "/".join([base, *(["namespaces", namespace] if namespace else []), f"{manifest['kind'].lower()}s"])


@asynccontextmanager
async def account(ask: Ask, namespace: str, admin: Path, file: Path) -> AsyncIterator[None]:
    """Have the account for the length of the block, and `file` as its kubeconfig. `admin`: the kubeconfig of `ask`."""
    made = []
    try:
        for each in manifests(namespace):
            await ask("POST", path(each), each)
            made.append(each)
        await _until_bound(ask, namespace)
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = await ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{NAME}/token", request)
        write_kubeconfig(file, _cluster(admin), namespace, {"token": token["status"]["token"]})
        yield
    finally:
        for each in made:
            if each["metadata"].get("namespace") != namespace:
                await ask("DELETE", f"{path(each)}/{each['metadata']['name']}", None)


async def _until_bound(ask: Ask, namespace: str) -> None:
    """Wait until the server goes by all bindings."""
    rights = (
        {"verb": "list", "resource": "pods", "namespace": namespace},
        {"verb": "get", "resource": "nodes"},
        {"verb": "get", "resource": "leases", "group": "coordination.k8s.io", "namespace": "kube-node-lease"},
    )
    for right in rights:
        await _until(ask, namespace, right, allowed=True)


async def forbid(ask: Ask, namespace: str, verb: str, resource: str) -> None:
    """Take a right in the namespace away."""
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{NAME}"
    role = await ask("GET", path, None)
    (group,) = {group for rule in role["rules"] if resource in rule["resources"] for group in rule["apiGroups"]}
    for rule in role["rules"]:
        if resource in rule["resources"]:
            rule["verbs"] = [each for each in rule["verbs"] if each != verb]
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
    await ask("PUT", path, role)
    what, _, sub = resource.partition("/")
    right = {"verb": verb, "group": group, "resource": what, "subresource": sub, "namespace": namespace}
    await _until(ask, namespace, right, allowed=False)


async def _until(ask: Ask, namespace: str, right: dict[str, str], *, allowed: bool) -> None:
    """Wait until the server gives the account a right, or not any more."""
    user, version = f"system:serviceaccount:{namespace}:{NAME}", "authorization.k8s.io/v1"
    spec = {"user": user, "resourceAttributes": right}
    review = {"apiVersion": version, "kind": "SubjectAccessReview", "spec": spec}
    async with asyncio.timeout(30):
        while (await ask("POST", f"/apis/{version}/subjectaccessreviews", review))["status"]["allowed"] != allowed:
            pass


def _cluster(kubeconfig: Path) -> dict[str, str]:
    content = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    (context,) = (each["context"] for each in content["contexts"] if each["name"] == content["current-context"])
    cluster: dict[str, str]
    (cluster,) = (each["cluster"] for each in content["clusters"] if each["name"] == context["cluster"])
    if "certificate-authority" in cluster:
        cluster["certificate-authority"] = str(kubeconfig.parent / cluster["certificate-authority"])
    return cluster


def kubeconfig(cluster: dict[str, Any], namespace: str, user: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a kubeconfig of one cluster and one account, with another context that is not there."""
    elsewhere = {"cluster": "none", "user": "none"}
    return {
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [
            {"name": "elsewhere", "context": elsewhere},
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}},
        ],
    }


def write_kubeconfig(file: Path, cluster: dict[str, Any], namespace: str, user: dict[str, Any] | None = None) -> None:
    content = kubeconfig(cluster, namespace, {"token": "test"} if user is None else user)
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
