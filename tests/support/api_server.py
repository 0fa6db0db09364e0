"""What an API server refuses of an object although its schema accepts it: names, labels, and what belongs together."""

import re
from collections.abc import Iterator

from helm_chart import Manifest

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_WORD = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
_IMAGE = re.compile(r"[!-.0-~][!-~]*")


def refusals(manifest: Manifest) -> Iterator[str]:
    """Yield what an API server would say of an object."""
    metadata, kind = manifest["metadata"], manifest["kind"]
    names = _SERVICE if kind == "Service" else _DOMAIN
    if not names.fullmatch(metadata["name"]) or len(metadata["name"]) > 253:
        yield f"{kind} {metadata['name']}: is no name"
    yield from _labels(metadata)
    spec = manifest.get("spec", {})
    match kind:
        case "Deployment":
            yield from _labels(spec["template"]["metadata"])
            selected = spec["selector"]["matchLabels"].items()
            if not selected <= spec["template"]["metadata"]["labels"].items():
                yield "selector: does not match the labels of pods"
            if spec.get("strategy", {}).get("type") == "Recreate" and "rollingUpdate" in spec["strategy"]:
                yield "strategy: Recreate has no rollingUpdate"
            yield from _pod(spec["template"]["spec"])
        case "Pod":
            yield from _pod(spec)
        case "PodDisruptionBudget":
            if len(spec.keys() & {"minAvailable", "maxUnavailable"}) != 1:
                yield "PodDisruptionBudget: has one limit"
        case "HorizontalPodAutoscaler":
            if spec["minReplicas"] > spec["maxReplicas"]:
                yield "HorizontalPodAutoscaler: minReplicas is above maxReplicas"


def _labels(metadata: Manifest) -> Iterator[str]:
    for key, value in metadata.get("labels", {}).items():
        if not _WORD.fullmatch(value) or not _qualified(key):
            yield f"label {key}: {value}: is refused"
    yield from (f"annotation {key}: is refused" for key in metadata.get("annotations", {}) if not _qualified(key))


def _qualified(key: str) -> bool:
    domain, _, name = key.rpartition("/")
    return bool(name and _WORD.fullmatch(name) and (not domain or _DOMAIN.fullmatch(domain)))


def _pod(pod: Manifest) -> Iterator[str]:
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    volumes = [volume["name"] for volume in pod["volumes"]]
    for what, names in (("containers", [each["name"] for each in containers]), ("volumes", volumes)):
        if len({*names}) != len(names) or not all(map(_LABEL.fullmatch, names)):
            yield f"{what}: {names}: have each a name of their own"
    if any(len(volume) != 2 for volume in pod["volumes"]):
        yield "volumes: each has one source"
    for container in containers:
        yield from (f"{container['name']}: {problem}" for problem in _container(container, volumes, pod))


def _container(container: Manifest, volumes: list[str], pod: Manifest) -> Iterator[str]:
    if not _IMAGE.fullmatch(container["image"]) or "//" in container["image"]:
        yield f"image: {container['image']}: is refused"
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
    if len({*paths}) != len(paths) or any(":" in path for path in paths):
        yield f"volumeMounts: {paths}: are refused"
    yield from (f"mounts {each['name']}" for each in container.get("volumeMounts", []) if each["name"] not in volumes)
    yield from _variables(container.get("env", []))
    for limits in container.get("resources", {}).values():
        for name, amount in limits.items():
            if not _QUANTITY.fullmatch(str(amount)) or not _qualified(name):
                yield f"resources: {name}: {amount}: is refused"
    for handler in container.get("lifecycle", {}).values():
        if len(handler) != 1:
            yield f"lifecycle: {handler}: has one action"
        if handler.get("sleep", {"seconds": 1})["seconds"] > pod.get("terminationGracePeriodSeconds", 30):
            yield "lifecycle: sleeps for longer than the pod may take to end"


def _variables(variables: list[Manifest]) -> Iterator[str]:
    for variable in variables:
        if not _VARIABLE.fullmatch(variable["name"]) or not isinstance(variable.get("value", ""), str):
            yield f"env: {variable}: is refused"
        if "value" in variable and "valueFrom" in variable:
            yield f"env: {variable['name']}: has a value and a source"
