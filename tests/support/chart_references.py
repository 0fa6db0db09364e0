"""What the chart's manifests name of each other, and whether it is there."""

from collections.abc import Collection, Iterator
from typing import Any

from helm_chart import Manifest, named_templates, of_kind


def texts(values: Any) -> Iterator[str]:  # noqa: ANN401 - values of the chart
    """Yield all texts in values."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict | list):
        for each in values.values() if isinstance(values, dict) else values:
            yield from texts(each)


def dangling(manifests: list[Manifest], given: Collection[str]) -> Iterator[str]:
    """Yield each name of an object, or of a port, that nothing has. `given`: names that the values have."""
    pods = [template for _, template in named_templates(manifests)]
    for pod in pods:
        yield from _volumes(manifests, pod, given)
    for name, service in of_kind(manifests, "Service").items():
        yield from _ports(name, service["spec"], pods)
    for name, budget in of_kind(manifests, "PodDisruptionBudget").items():
        if not any(_selects(budget["spec"]["selector"]["matchLabels"], pod) for pod in pods):
            yield f"PodDisruptionBudget {name}: selects no pods"
    yield from _routes(manifests)
    yield from _monitors(manifests, pods)


def _volumes(manifests: list[Manifest], pod: Manifest, given: Collection[str]) -> Iterator[str]:
    """Yield what a pod names that is neither rendered nor in the values."""
    secrets = {*of_kind(manifests, "Secret"), *given}
    secrets |= {each["spec"]["secretName"] for each in manifests if each["kind"] == "Certificate"}
    maps, accounts = {*of_kind(manifests, "ConfigMap"), *given}, {*of_kind(manifests, "ServiceAccount"), *given}
    claims = {*of_kind(manifests, "PersistentVolumeClaim"), *given}
    component, spec = pod["metadata"]["labels"]["app.kubernetes.io/component"], pod["spec"]
    for volume in spec["volumes"]:
        if volume.get("secret", {}).get("secretName", "") not in {"", *secrets}:
            yield f"{component}: the secret {volume['secret']['secretName']} is not there"
        if volume.get("configMap", {}).get("name", "") not in {"", *maps}:
            yield f"{component}: the map {volume['configMap']['name']} is not there"
        if volume.get("persistentVolumeClaim", {}).get("claimName", "") not in {"", *claims}:
            yield f"{component}: the claim {volume['persistentVolumeClaim']['claimName']} is not there"
    if spec["serviceAccountName"] not in accounts:
        yield f"{component}: the account {spec['serviceAccountName']} is not there"


def _ports(name: str, service: Manifest, pods: list[Manifest]) -> Iterator[str]:
    selected = [pod for pod in pods if _selects(service["selector"], pod)]
    if not selected:
        yield f"Service {name}: selects no pods"
    for pod in selected:
        named = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        for port in service["ports"]:
            if named.get(port["targetPort"]) != port["port"]:
                yield f"Service {name}: {port['targetPort']} is not port {port['port']} of its pods"


def _routes(manifests: list[Manifest]) -> Iterator[str]:
    services = of_kind(manifests, "Service")
    for each in manifests:
        match each["kind"]:
            case "Ingress":
                paths = [path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]]
                backends = [path["backend"]["service"] for path in paths]
                asked = [(backend["name"], "name", backend["port"]["name"]) for backend in backends]
            case "GRPCRoute" | "HTTPRoute":
                backends = [backend for rule in each["spec"]["rules"] for backend in rule["backendRefs"]]
                asked = [(backend["name"], "port", backend["port"]) for backend in backends]
            case _:
                continue
        for name, key, value in asked:
            if name not in services or value not in [port[key] for port in services[name]["spec"]["ports"]]:
                yield f"{each['kind']}: the Service {name} has no port {value}"


def _monitors(manifests: list[Manifest], pods: list[Manifest]) -> Iterator[str]:
    for name, monitor in of_kind(manifests, "PodMonitor").items():
        selected = [pod for pod in pods if _selects(monitor["spec"]["selector"]["matchLabels"], pod)]
        named = [{port["name"] for port in pod["spec"]["containers"][0]["ports"]} for pod in selected]
        asked = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        if len(selected) < len(pods) or not all(asked <= names for names in named):
            yield f"PodMonitor {name}: not all pods have the ports {asked}"
    for name, monitor in of_kind(manifests, "ServiceMonitor").items():
        services = [each["spec"] for each in of_kind(manifests, "Service").values()]
        whole = [each for each in services if all(_selects(each["selector"], pod) for pod in pods)]
        named = [{port["name"] for port in each["ports"]} for each in whole]
        if not any({endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names for names in named):
            yield f"ServiceMonitor {name}: no Service of all pods has its ports"


def _selects(labels: Manifest, pod: Manifest) -> bool:
    return labels.items() <= pod["metadata"]["labels"].items()  # type: ignore[no-any-return]
