"""Schemas of the parts of manifests that values may hold: those of Kubernetes, with what its API server checks beside.

Every text has a pattern. A part of a manifest that an API server would refuse is so refused by name.
"""

import json
from importlib.resources import files
from itertools import combinations
from typing import Any

Schema = dict[str, Any]

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def like(pattern: str, most: int | None = None) -> Schema:
    """Return the schema of a text that a pattern matches as a whole, of at most so many characters."""
    return {"type": "string", "pattern": f"^({pattern})$", **({} if most is None else {"maxLength": most})}


def one_of(*texts: str) -> Schema:
    return {"type": "string", "enum": list(texts)}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def integer(least: int, most: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def map_of(keys: str, values: Schema) -> Schema:
    return {"type": "object", "propertyNames": {"pattern": f"^({keys})$"}, "additionalProperties": values}


TEXT: Schema = {
    "type": "string",
    "pattern": "^[^\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\ufffe\uffff]*$",
}  # what YAML can carry
WORD = like("[!-~]+")
IMAGE = like(r"[A-Za-z0-9][-A-Za-z0-9._]*(:\d+)?(/[A-Za-z0-9][-A-Za-z0-9._]*)*([:@][A-Za-z0-9][A-Za-z0-9._:-]*)?")
NAME = like(_LABEL)
SUBDOMAIN = like(_DOMAIN, 253)
HOST = like(rf"(\*\.)?{_DOMAIN}", 253)
KEY = like("[-._a-zA-Z0-9]+", 253)
QUALIFIED = f"({_DOMAIN}/)?{_WORD}"
LABELS = map_of(QUALIFIED, like(f"({_WORD})?"))
ANNOTATIONS = map_of(QUALIFIED, TEXT)
_RESOURCE = rf"cpu|memory|ephemeral-storage|{_DOMAIN}/{_WORD}"
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
QUANTITY: Schema = {"anyOf": [like(r"\d{1,15}(\.\d{1,3})?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"), integer(0, 2**53)]}
PERCENT = like("([0-9]|[1-9][0-9]|100)%")
PORT = integer(1, 65535)
PATH = like("/[!-9;-~]*")
CIDR = like(
    r"(\d{1,2}|1\d\d|2[0-4]\d|25[0-5])(\.(\d|[1-9]\d|1\d\d|2[0-4]\d|25[0-5])){3}/(\d|[12]\d|3[0-2])|[0-9a-f:]+:[0-9a-f:]*/\d{1,3}"
)

# By the definition and its property. What is not here, and is a text, is printable.
_REFINED: dict[str, Schema] = {
    **dict.fromkeys(("Container.name", "Volume.name", "VolumeMount.name"), NAME),
    **dict.fromkeys(("SecretKeySelector.name", "ConfigMapKeySelector.name", "SecretEnvSource.name"), SUBDOMAIN),
    **dict.fromkeys(("ConfigMapEnvSource.name", "LocalObjectReference.name", "ConfigMapProjection.name"), SUBDOMAIN),
    **dict.fromkeys(
        ("SecretProjection.name", "SecretVolumeSource.secretName", "ConfigMapVolumeSource.name"), SUBDOMAIN
    ),
    **dict.fromkeys(("SecretKeySelector.key", "ConfigMapKeySelector.key", "KeyToPath.key"), KEY),
    **dict.fromkeys(("EnvVar.name", "EnvFromSource.prefix"), like("[-._a-zA-Z][-._a-zA-Z0-9]*")),
    **dict.fromkeys(("VolumeMount.mountPath", "HostPathVolumeSource.path", "NFSVolumeSource.path"), PATH),
    **dict.fromkeys(("KeyToPath.path", "VolumeMount.subPath"), like(r"[a-zA-Z0-9_-][a-zA-Z0-9._/-]*[a-zA-Z0-9]")),
    **dict.fromkeys(("Toleration.key", "TopologySpreadConstraint.topologyKey"), like(QUALIFIED)),
    **dict.fromkeys(("PodAffinityTerm.topologyKey", "NodeSelectorRequirement.key"), like(QUALIFIED)),
    **dict.fromkeys(("PodAffinityTerm.namespaces",), list_of(NAME)),
    **dict.fromkeys(("ResourceRequirements.limits", "ResourceRequirements.requests"), map_of(_RESOURCE, QUANTITY)),
    **dict.fromkeys(("Container.image", "ImageVolumeSource.reference"), IMAGE),
    **dict.fromkeys(
        ("Container.imagePullPolicy", "ImageVolumeSource.pullPolicy"), one_of("Always", "IfNotPresent", "Never")
    ),
    **dict.fromkeys(
        ("SecretVolumeSource.defaultMode", "ConfigMapVolumeSource.defaultMode", "KeyToPath.mode"), integer(0, 0o777)
    ),
    **dict.fromkeys(
        ("PodSecurityContext.runAsUser", "PodSecurityContext.runAsGroup", "PodSecurityContext.fsGroup"), integer(1)
    ),
    "PodSecurityContext.supplementalGroups": list_of(integer(1)),
    "PodSecurityContext.fsGroupChangePolicy": one_of("OnRootMismatch", "Always"),
    "AppArmorProfile.type": one_of("RuntimeDefault", "Unconfined"),
    "SeccompProfile.type": one_of("RuntimeDefault", "Unconfined"),
    "PersistentVolumeClaimVolumeSource.claimName": SUBDOMAIN,
    "EmptyDirVolumeSource.medium": one_of("", "Memory"),
    "Toleration.operator": one_of("Exists", "Equal"),
    "Toleration.effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "Toleration.value": like(f"({_WORD})?"),
    "TopologySpreadConstraint.maxSkew": integer(1),
    "TopologySpreadConstraint.whenUnsatisfiable": one_of("DoNotSchedule", "ScheduleAnyway"),
    "NodeSelectorRequirement.operator": one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    "NodeSelectorRequirement.values": list_of(like(f"({_WORD})?")),
    "PreferredSchedulingTerm.weight": integer(1, 100),
    "WeightedPodAffinityTerm.weight": integer(1, 100),
    "Container.restartPolicy": one_of("Always"),
    "ContainerPort.name": like("[a-z]([-a-z0-9]{0,13}[a-z0-9])?"),
    "ContainerPort.containerPort": PORT,
    "ContainerPort.hostPort": PORT,
    "ContainerPort.protocol": one_of("TCP", "UDP", "SCTP"),
    "SleepAction.seconds": integer(1, 30),  # less than any grace period
    "DeploymentStrategy.type": one_of("Recreate", "RollingUpdate"),
    "RollingUpdateDeployment.maxSurge": {"anyOf": [integer(0), PERCENT]},
    "RollingUpdateDeployment.maxUnavailable": {"anyOf": [integer(0), PERCENT]},
    "LabelSelector.matchLabels": LABELS,
    "LabelSelectorRequirement.key": like(QUALIFIED),
    "LabelSelectorRequirement.operator": one_of("In", "NotIn", "Exists", "DoesNotExist"),
    "LabelSelectorRequirement.values": list_of(like(f"({_WORD})?")),
    "NetworkPolicyPort.port": {"anyOf": [PORT, like("[a-z]([-a-z0-9]{0,13}[a-z0-9])?")]},
    "NetworkPolicyPort.protocol": one_of("TCP", "UDP", "SCTP"),
    "NetworkPolicyPort.endPort": PORT,
    "IPBlock.cidr": CIDR,
    "IPBlock.except": list_of(CIDR),
    "HPAScalingPolicy.type": one_of("Pods", "Percent"),
    "HPAScalingPolicy.value": integer(1),
    "HPAScalingPolicy.periodSeconds": integer(1, 1800),
    "HPAScalingRules.stabilizationWindowSeconds": integer(0, 3600),
    "HPAScalingRules.selectPolicy": one_of("Max", "Min", "Disabled"),
}


def _at_most_one(*keys: str) -> Schema:
    return {"not": {"anyOf": [{"required": list(pair)} for pair in combinations(keys, 2)]}}


# Limits of a definition as a whole, and what it requires beside what Kubernetes' schema does.
_WHOLE: dict[str, Schema] = {
    "Container": {"required": ["name", "image"]},
    # Those that run on beside the others alone have hooks and probes.
    "InitContainer": {
        "required": ["name", "image"],
        "dependencies": {key: ["restartPolicy"] for key in ("lifecycle", *_PROBES)},
    },
    "EnvVar": _at_most_one("value", "valueFrom"),
    "Toleration": {"dependencies": {"value": ["key"], "tolerationSeconds": ["effect"]}},
    "Probe": _at_most_one("exec", "grpc", "httpGet", "tcpSocket"),
    "NetworkPolicyPeer": {**_at_most_one("ipBlock", "podSelector"), "minProperties": 1},
    "DownwardAPIVolumeFile": _at_most_one("fieldRef", "resourceFieldRef"),
    "VolumeProjection": {"minProperties": 1, "maxProperties": 1},
    "EnvFromSource": _at_most_one("configMapRef", "secretRef"),
    "EnvVarSource": {"minProperties": 1, "maxProperties": 1},
    "LifecycleHandler": {"minProperties": 1, "maxProperties": 1},
    "Volume": {"minProperties": 2, "maxProperties": 2},
    "SecretKeySelector": {"required": ["name", "key"]},
    "ConfigMapKeySelector": {"required": ["name", "key"]},
    "SecretEnvSource": {"required": ["name"]},
    "ConfigMapEnvSource": {"required": ["name"]},
    "LocalObjectReference": {"required": ["name"]},
    "SecretVolumeSource": {"required": ["secretName"]},
    "ConfigMapVolumeSource": {"required": ["name"]},
}

# What is left out: sources of volumes that only one cloud has or that CSI replaces, and settings of other systems.
_LEFT_OUT = {
    *(
        "windowsOptions",
        "stdin",
        "stdinOnce",
        "tty",
        "resizePolicy",
        "terminationMessagePath",
        "terminationMessagePolicy",
    ),
    *("claims", "hostIP", "hostPort", "localhostProfile", "procMount", "mountPropagation", "recursiveReadOnly"),
    *("subPathExpr", "clusterTrustBundle", "volumeDevices", "ephemeral", "gitRepo", "flexVolume", "flocker"),
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "gcePersistentDisk", "glusterfs"),
    *("iscsi", "photonPersistentDisk", "portworxVolume", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
}

# Values that are such parts, or lists of them.
PARTS = {
    "affinity": "Affinity",
    "lifecycle": "Lifecycle",
    "podSecurityContext": "PodSecurityContext",
    "resources": "ResourceRequirements",
    "strategy": "DeploymentStrategy",
    "behavior": "HorizontalPodAutoscalerBehavior",
}
LISTS = {
    "tolerations": "Toleration",
    "topologySpreadConstraints": "TopologySpreadConstraint",
    "extraEnv": "EnvVar",
    "extraEnvFrom": "EnvFromSource",
    "extraVolumes": "Volume",
    "extraVolumeMounts": "VolumeMount",
    "initContainers": "InitContainer",
    "extraContainers": "Container",
    "imagePullSecrets": "LocalObjectReference",
    "clients": "NetworkPolicyPeer",
    "prometheus": "NetworkPolicyPeer",
    "dns": "NetworkPolicyPeer",
    "to": "NetworkPolicyPeer",
    "extraEgress": "NetworkPolicyEgressRule",
    "extraIngress": "NetworkPolicyIngressRule",
}


def definitions(version: str) -> dict[str, Schema]:
    """Return the definitions of all parts, by their short names, for a version of Kubernetes such as 1.31."""
    given, found = _given(version), dict[str, Schema]()
    given["InitContainer"] = given["Container"]
    left = sorted({*PARTS.values(), *LISTS.values()})
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _refined(name, given[name])
            left += sorted(_referred(found[name]))
    return dict(sorted(found.items()))


def reference(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _given(version: str) -> dict[str, Schema]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    known = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    groups = ("api.core.v1", "api.apps.v1", "api.autoscaling.v2", "api.networking.v1", "apimachinery.pkg.apis.meta.v1")
    return {
        name.rpartition(".")[2]: schema
        for name, schema in known.items()
        if name.rpartition(".")[0] in {f"io.k8s.{group}" for group in groups}
    }


def _refined(name: str, given: Schema) -> Schema:
    """Return a definition with the patterns and limits that the API server checks, without texts for people."""
    known = name.replace("InitContainer", "Container")
    properties = {
        key: _REFINED.get(f"{known}.{key}", _plain(schema))
        for key, schema in given.get("properties", {}).items()
        if key not in _LEFT_OUT and f"{name}.{key}" != "Container.restartPolicy"
    }
    required = {"required": given["required"]} if "required" in given else {}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **required,
        **_WHOLE.get(name, {}),
    }


def _plain(schema: Schema) -> Schema:
    """Return a property's schema: null is no value, and texts are printable."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition(".")[2]
        return {"Quantity": QUANTITY, "IntOrString": {"anyOf": [integer(0), WORD]}}.get(name, reference(name))
    given = schema["type"]
    (kind,) = {given} if isinstance(given, str) else {*given} - {"null"}
    match kind:
        case "string":
            return TEXT
        case "integer":
            return integer(0)
        case "array":
            return list_of(_plain(schema["items"]))
        case "object":
            return map_of(QUALIFIED, _plain(schema.get("additionalProperties", {"type": "string"})))
        case _:
            return {"type": kind}


def _referred(schema: Any) -> set[str]:  # noqa: ANN401 - a part of a schema
    if isinstance(schema, dict):
        found = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set()
        return found.union(*map(_referred, schema.values()))
    return set().union(*map(_referred, schema)) if isinstance(schema, list) else set()
