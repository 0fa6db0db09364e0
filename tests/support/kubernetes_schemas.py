"""Checks manifests against the schemas of Kubernetes' own resources, and of those that others define."""

import importlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jsonschema import Draft4Validator  # in which bounds are as in Kubernetes
from jsonschema_rs import Draft7Validator, Draft202012Validator, Registry
from policy_definition import definition

from pdserve.kubernetes.objects import GROUP, VERSION

Manifest = dict[str, Any]

# Where models of others' resources are; those that no package has are written below.
_MODELS = {
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def problems(manifest: Manifest, version: str) -> list[str]:
    """Return what Kubernetes of that version, such as 1.37, would refuse; unknown fields too."""
    return [
        error.message for error in _validator(manifest["apiVersion"], manifest["kind"], version).iter_errors(manifest)
    ]


@cache
def _validator(api_version: str, kind: str, version: str) -> Any:  # noqa: ANN401 - a validator
    if api_version in _MODELS:
        return Draft202012Validator(_of_model(getattr(importlib.import_module(_MODELS[api_version]), kind)))
    if api_version == "gateway.networking.k8s.io/v1":
        return Draft202012Validator(_route())
    if kind == "LeaderWorkerSet":
        return Draft7Validator(_groups(version), registry=_definitions(version))
    if api_version == f"{GROUP}/{VERSION}":
        (known,) = definition()["spec"]["versions"]
        return Draft4Validator(known["schema"]["openAPIV3Schema"])
    group, _, name = api_version.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.split(".")[0], name) if part)
    return Draft7Validator(_read(version, f"{file}.json"), registry=_definitions(version))


def _read(version: str, name: str) -> Manifest:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    found: Manifest = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


@cache
def _definitions(version: str) -> Registry:
    return Registry([("_definitions.json", _read(version, "_definitions.json"))])


def _of_model(model: Any) -> Manifest:  # noqa: ANN401 - a pydantic model
    schema: Manifest = model.model_json_schema(by_alias=True)
    for part in (schema, *schema.get("$defs", {}).values()):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return schema


def _object(*required: str, **properties: object) -> Manifest:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _text(pattern: str, most: int) -> Manifest:
    return {"type": "string", "pattern": f"^({pattern})$", "minLength": 1, "maxLength": most}


def _route() -> Manifest:
    name, kind = _text(_DOMAIN, 253), _text("[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?", 63)
    referred = {"group": name, "kind": kind, "name": name, "namespace": _text("[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63)}
    parent = _object("name", **referred, sectionName=name, port=_PORT)
    backend = _object("name", "port", name=name, port=_PORT)
    rule = _object("backendRefs", backendRefs={"type": "array", "minItems": 1, "items": backend})
    spec = _object(
        *("parentRefs", "rules"),
        parentRefs={"type": "array", "minItems": 1, "maxItems": 32, "items": parent},
        hostnames={"type": "array", "maxItems": 16, "items": _text(rf"(\*\.)?{_DOMAIN}", 253)},
        rules={"type": "array", "minItems": 1, "items": rule},
    )
    kinds = {"enum": ["GRPCRoute", "HTTPRoute"]}
    return _object("apiVersion", "kind", "metadata", "spec", apiVersion={}, kind=kinds, metadata={}, spec=spec)


def _groups(version: str) -> Manifest:
    """Return the schema of leaderworkerset.x-k8s.io/v1, as far as charts need it; pods are as in a Deployment."""
    known = f"{_read(version, '_definitions.json')['$id']}#/$defs/io.k8s"
    pod = {"$ref": f"{known}.api.core.v1.PodTemplateSpec"}
    metadata = {"$ref": f"{known}.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    rolling = _object(maxUnavailable={"type": ["integer", "string"]}, maxSurge={"type": ["integer", "string"]})
    rollout = _object("type", type={"enum": ["RollingUpdate"]}, rollingUpdateConfiguration=rolling)
    restart = {"enum": ["RecreateGroupOnPodRestart", "None"]}
    template = _object(
        *("workerTemplate", "size"),
        leaderTemplate=pod,
        workerTemplate=pod,
        size={"type": "integer", "minimum": 1},
        restartPolicy=restart,
    )
    spec = _object(
        "leaderWorkerTemplate",
        replicas={"type": "integer", "minimum": 0},
        leaderWorkerTemplate=template,
        rolloutStrategy=rollout,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    )
    version_of = {"enum": ["leaderworkerset.x-k8s.io/v1"]}
    return _object(
        "apiVersion", "kind", "metadata", "spec", apiVersion=version_of, kind={}, metadata=metadata, spec=spec
    )
