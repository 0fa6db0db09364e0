"""Writes values.schema.json of the chart, by which Helm refuses values and names them.

Keys are those of values.yaml. KEYS has the schema of each text, list and map; a key that is not there fails. Settings
of processes and policies are those of their models. Parts of manifests are those of Kubernetes.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kubernetes_parts as parts
import yaml
from kubernetes_parts import Schema, integer, like, list_of, one_of
from pydantic import BaseModel, ConfigDict, create_model

from pdserve.autoscaler.schema import Policy, Untitled
from pdserve.base.yaml_models import Section
from pdserve.net.certificates import Part
from pdserve.router.config import EndpointConfig, FrontendConfig, ModelSettings, RouterConfig
from pdserve.settings.autoscaler import AutoscalerConfig
from pdserve.settings.config import ServingConfig, WorkerConfig
from pdserve.settings.process import ProcessConfig

CHART = Path(__file__).parents[1] / "pdserve"
FILE = CHART / "values.schema.json"

# Settings that the chart decides, or has a key of its own for.
OF_THE_CHART = {
    *("model", "served_model_name", "secret_file", "identity_dir", "ssl_certfile", "ssl_keyfile", "api_keys_file"),
    *("host", "port", "http_host", "http_port", "internal_host", "internal_port"),
    *("handoff_host", "handoff_port", "handoff_rdma_devices", "dialect_host", "dialect_port"),
    *("health_host", "health_port", "metrics_host", "metrics_port", "drain_timeout_s"),
    *("role", "routers", "router_id", "frontend_id", "worker_id", "launch_id", "incarnation", "shares_ports", "models"),
    *("termination_message_file", "serve_clients"),
    *("device", "policy", "policy_resource", "name", "nnodes", "master_port"),
}

_REPOSITORY = r"[a-z0-9]([-a-z0-9._]*[a-z0-9])?(:\d+)?(/[a-z0-9]([-a-z0-9._]*[a-z0-9])?)*"
_MODEL = r"[A-Za-z0-9]([-\w.]*\w)?"
_SECONDS = integer(0, 86_400)
_SECRET_KEY = {"name": parts.SUBDOMAIN, "key": parts.KEY}
_ISSUER = {"name": parts.SUBDOMAIN, "kind": like("[A-Z][A-Za-z]*"), "group": parts.SUBDOMAIN}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _or_empty(schema: Schema) -> Schema:
    """Return the schema of a text that may be left empty."""
    return {**schema, "pattern": f"^$|{schema['pattern']}"}


def _together(properties: Schema, **needed: list[str]) -> Schema:
    """Return the schema of an object that may be empty; `needed`: what a key needs beside it."""
    return {**_object(properties), "dependencies": needed}


_PARENT = {
    **_object(
        {
            **dict.fromkeys(("name", "sectionName", "group"), parts.SUBDOMAIN),
            "namespace": parts.NAME,
            "kind": like("[A-Z][A-Za-z]*", 63),
            "port": parts.PORT,
        }
    ),
    "required": ["name"],
}
_COUNT_OR_SHARE = {"anyOf": [integer(0), _or_empty(parts.PERCENT)]}

# By the name of a key, or by its parent's name too where keys of one name differ.
KEYS: dict[str, Schema] = {
    **{key: parts.reference(name) for key, name in parts.PARTS.items()},
    **{key: list_of(parts.reference(name)) for key, name in parts.LISTS.items()},
    **dict.fromkeys(("labels", "podLabels", "nodeSelector"), parts.LABELS),
    **dict.fromkeys(("annotations", "podAnnotations"), parts.ANNOTATIONS),
    **dict.fromkeys(("nameOverride", "fullnameOverride"), _or_empty(like("[a-z]([-a-z0-9]{0,38}[a-z0-9])?"))),
    **dict.fromkeys(("existingSecret", "claimName", "className", "tlsSecret"), _or_empty(parts.SUBDOMAIN)),
    **dict.fromkeys(("existingClaim", "storageClass"), _or_empty(parts.SUBDOMAIN)),
    **dict.fromkeys(("serviceAccount.name", "priorityClassName", "runtimeClassName"), _or_empty(parts.SUBDOMAIN)),
    **{f"existingSecrets.{part}": _or_empty(parts.SUBDOMAIN) for part in Part},
    **dict.fromkeys(("imageRegistry", "image.repository"), _or_empty(like(_REPOSITORY))),
    **dict.fromkeys(("devices.resource", "resourceName"), like(parts.QUALIFIED)),
    **dict.fromkeys(("sharedMemory", "sizeLimit"), parts.QUANTITY),
    **dict.fromkeys(("rdma.count", "durationDays", "waitingPerReplica", "maxTokens"), integer(1)),
    **dict.fromkeys(("minAvailable", "maxUnavailable"), _COUNT_OR_SHARE),
    **dict.fromkeys(("drainTimeoutSeconds", "preStopSleepSeconds"), _SECONDS),
    "startupTimeoutSeconds": integer(2, 86_400),
    "replicas": integer(0),
    "models": {"type": "array", "maxItems": 64},
    "devices.count": integer(0),
    "workers.nodes": integer(1, 64),
    "persistence.size": like(r"[1-9]\d{0,14}(k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"),
    "accessModes": {**list_of(one_of("ReadWriteMany", "ReadWriteOnce")), "minItems": 1},
    "extraArgs": list_of(parts.TEXT),
    "extraObjects": list_of({"type": "object", "additionalProperties": True}),  # templates, which Kubernetes checks
    "tokenSecret": _together(_SECRET_KEY, name=["key"], key=["name"]),
    "issuerRef": _together(_ISSUER, kind=["name"], group=["name"]),
    "dnsNames": list_of(parts.HOST),
    "hostnames": {**list_of(parts.HOST), "maxItems": 16},
    "ingress.host": _or_empty(parts.HOST),
    "loadBalancerSourceRanges": list_of(parts.CIDR),
    "parentRefs": {**list_of(_PARENT), "maxItems": 32},
    "kubernetesApi.ports": list_of(parts.PORT),
    "rdma.devices": list_of(like(r"\w+:\d+")),
    "networks": _or_empty(parts.WORD),
    "tag": _or_empty(like(r"\w[\w.-]{0,127}")),
    "digest": _or_empty(like("sha256:[0-9a-f]{64}")),
    "interval": like(r"[1-9]\d{0,5}(ms|s|m)"),
    "trustDomain": like("[a-z0-9._-]+"),
    "autoscaling.prometheus": like(r"https?://[!-~]+"),
    "model.path": _or_empty(like("[!-~]+")),
    "servedName": _or_empty(parts.TEXT),
    "subPath": _or_empty(like(r"[A-Za-z0-9_-][\w.-]*(/[A-Za-z0-9_-][\w.-]*)*")),
    "image.reference": _or_empty(parts.IMAGE),
    "hub.repository": _or_empty(like(f"{_MODEL}/{_MODEL}")),
    "revision": like(r"\w[\w./-]*"),
    "prompt": parts.TEXT,
    "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "service.type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "ingress.port": one_of("http", "grpc"),
    "route.kind": one_of("GRPCRoute", "HTTPRoute"),
    "model.source": one_of("catalog", "builtIn", "pvc", "image", "hub"),
    "public.from": one_of("secret", "certManager", "chart"),
    "identity.from": one_of("none", "secret", "certManager"),
    "autoscaling.by": one_of("none", "pdserve", "hpa", "keda"),
    "follow": one_of("desired", "waiting"),
    "policyAs": one_of("ConfigMap", "AutoscalingPolicy"),
    "metrics": one_of("none", "PodMonitor", "ServiceMonitor"),
}
_OF_MODELS = {"config", "policy"}
_OF_POOLS = {"prefill", "decode"}
_OF_ADDRESS = {"service", "ingress", "route"}  # at which clients are served, of any model
_OF_ENDPOINTS = (
    EndpointConfig.model_fields.keys() - ServingConfig.model_fields.keys() - ModelSettings.model_fields.keys()
)


def _shape(default: object, name: str, parent: str = "") -> Schema:
    """Return the schema of a key with this default."""
    known = KEYS.get(f"{parent}.{name}", KEYS.get(name))
    if known is not None:
        return known
    match default:
        case bool():
            return {"type": "boolean"}
        case dict() if default:
            return _object({key: _shape(each, key, name) for key, each in default.items() if key not in _OF_MODELS})
        case _:
            raise KeyError(f"{parent}.{name}: KEYS says nothing of it")


class _Settings(BaseModel):
    """Settings of a process, of which none is required: the chart has the others."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), json_schema_extra=lambda schema: schema.pop("required", None)
    )


def _without(cls: type[BaseModel], base: type[BaseModel], names: Collection[str]) -> Any:  # noqa: ANN401 - a model
    """Return a model of the fields of `cls` whose names are not among `names`."""
    fields: Any = {name: (field.annotation, field) for name, field in cls.model_fields.items() if name not in names}
    return create_model(f"{cls.__name__}Values", __base__=base, __doc__=cls.__doc__, **fields)


_PROCESSES: dict[str, type[ProcessConfig]] = {
    "pods": ProcessConfig,
    "router": RouterConfig,
    "frontends": FrontendConfig,
    "workers": WorkerConfig,
    "operator": AutoscalerConfig,
}
_Models = create_model(
    "Models",
    policy=_without(Policy, Section, {"api_version", "kind", "actuator"}),
    **{part: _without(config, _Settings, OF_THE_CHART) for part, config in _PROCESSES.items()},
)


class _Plain(Untitled):
    """As Helm reads it: an older draft. Defaults are the processes' own."""

    schema_dialect = "http://json-schema.org/draft-07/schema#"

    def default_schema(self, schema: Any) -> Any:  # noqa: ANN401 - pydantic's
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> Any:  # noqa: ANN401 - pydantic's
        return self.generate_inner(schema["schema"])  # to Helm, null means a key that is left out

    def str_schema(self, schema: Any) -> Any:  # noqa: ANN401 - pydantic's
        return {**parts.TEXT, **super().str_schema(schema)}


def _entry(values: Schema) -> Schema:
    """Return the schema of one of several models: what may differ from the values of the chart."""
    model, router = values["model"]["properties"], values["router"]["properties"]
    config = [each for each in RouterConfig.model_fields if each not in OF_THE_CHART | _OF_ENDPOINTS]
    hub = {key: model["hub"]["properties"][key] for key in ("repository", "revision")}
    own = {
        "name": like("[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?"),
        "model": _object({"path": model["path"], "servedName": model["servedName"], "hub": _object(hub)}),
        "router": _object(
            {key: each for key, each in router.items() if key not in _OF_ADDRESS}
            | {"config": _object({key: {"$ref": f"#/$defs/RouterConfigValues/properties/{key}"} for key in config})}
        ),
        **{key: {"$ref": f"#/properties/{key}"} for key in ("workers", "prefill", "decode", "operator", "autoscaling")},
    }
    return {**_object(own), "required": ["name"]}


def oldest_kubernetes() -> str:
    """Return the oldest version of Kubernetes that the chart supports, such as 1.31."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    return ".".join(re.findall(r"\d+", chart["kubeVersion"])[:2])


def values_schema() -> str:
    """Return the JSON Schema of the chart's values."""
    models = _Models.model_json_schema(schema_generator=_Plain)
    keys = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    values = {key: _shape(default, key) for key, default in keys.items() if key not in _OF_POOLS}
    common = {key: {"$ref": f"#/properties/pods/properties/{key}"} for key in values["pods"]["properties"]}
    for part in _PROCESSES:
        own = values[part]["properties"]
        values[part] = _object({**own, **(common if part != "pods" else {}), "config": models["properties"][part]})
    for pool in sorted(_OF_POOLS):
        values[pool] = {"$ref": "#/properties/workers"}
    values["autoscaling"]["properties"]["policy"] = models["properties"]["policy"]
    values["models"]["items"] = _entry(values)
    values["global"]["additionalProperties"] = True  # charts that hold this one have keys of their own there
    known = {**models["$defs"], **parts.definitions(oldest_kubernetes())}
    schema = {"$schema": _Plain.schema_dialect, "$defs": known, **_object(values)}
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(values_schema(), encoding="utf-8")
