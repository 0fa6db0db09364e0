"""Writes values.schema.json of the chart, by which Helm refuses values and names them.

Keys and their types are those of the defaults in values.yaml; KEYS has what a default does not show. The settings of
processes and policies are those of their models.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, create_model

from pdserve.autoscaler.schema import Policy, Untitled
from pdserve.config import AutoscalerConfig, ProcessConfig, WorkerConfig
from pdserve.router.config import RouterConfig
from pdserve.yaml_models import Section

Schema = dict[str, Any]

CHART = Path(__file__).parents[1] / "pdserve"
FILE = CHART / "values.schema.json"

# Settings that the chart decides, or has a key of its own for.
OF_THE_CHART = {
    *("model", "served_model_name", "secret_file", "identity_dir", "ssl_certfile", "ssl_keyfile", "api_keys_file"),
    *("host", "port", "http_host", "http_port", "internal_host", "internal_port"),
    *("handoff_host", "handoff_port", "handoff_rdma_devices", "dialect_host", "dialect_port"),
    *("health_host", "health_port", "metrics_host", "metrics_port", "drain_timeout_s"),
    *("role", "routers", "router_id", "worker_id", "launch_id", "incarnation", "termination_message_file"),
    *("tensor_parallel_size", "policy", "policy_resource", "name", "serve_clients"),
}


def _one_of(*texts: str) -> Schema:
    return {"type": "string", "enum": list(texts)}


def _like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def _at_least(minimum: int) -> Schema:
    return {"type": "integer", "minimum": minimum}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


TEXT: Schema = {"type": "string"}
MANIFEST: Schema = {"type": "object", "additionalProperties": True}  # a part of a manifest, which Kubernetes checks
NAMES: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY = _like(r"^\d+(\.\d+)?([EPTGMk]i?)?$")

# By the name of a key, or by its parent's name too where keys of one name differ.
KEYS: dict[str, Schema] = {
    **dict.fromkeys(("annotations", "labels", "podAnnotations", "podLabels", "nodeSelector"), NAMES),
    **dict.fromkeys(("tokenSecret", "issuerRef"), NAMES),
    **dict.fromkeys(("extraArgs", "dnsNames", "hostnames", "loadBalancerSourceRanges"), _list_of(TEXT)),
    **dict.fromkeys(("sharedMemory", "sizeLimit"), QUANTITY),
    **dict.fromkeys(("maxSkew", "rdma.count", "durationDays", "waitingPerReplica", "maxTokens"), _at_least(1)),
    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _at_least(1)),
    "startupTimeoutSeconds": _at_least(2),
    "maxUnavailable": {"anyOf": [_at_least(0), _like(r"^\d+%$")]},
    "imagePullSecrets": _list_of(NAMES),
    "ports": _list_of({"type": "integer", "minimum": 1, "maximum": 65535}),
    "rdma.devices": _list_of(_like(r"^\w+:\d+$")),
    "digest": _like(r"^(sha256:[0-9a-f]{64})?$"),
    "interval": _like(r"^\d+(ms|s|m)$"),
    "trustDomain": _like(r"^[a-z0-9._-]+$"),
    "model.path": {"type": "string", "minLength": 1},
    "pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
    "whenUnsatisfiable": _one_of("DoNotSchedule", "ScheduleAnyway"),
    "service.type": _one_of("ClusterIP", "NodePort", "LoadBalancer"),
    "ingress.port": _one_of("http", "grpc"),
    "route.kind": _one_of("GRPCRoute", "HTTPRoute"),
    "model.source": _one_of("catalog", "builtIn", "pvc", "image", "hub"),
    "public.from": _one_of("secret", "certManager", "chart"),
    "identity.from": _one_of("none", "secret", "certManager"),
    "autoscaling.by": _one_of("none", "pdserve", "hpa", "keda"),
    "follow": _one_of("desired", "waiting"),
    "policyAs": _one_of("ConfigMap", "AutoscalingPolicy"),
    "metrics": _one_of("none", "PodMonitor", "ServiceMonitor"),
}


def _shape(default: object, name: str, parent: str = "") -> Schema:
    """Return the schema of a key with this default."""
    known = KEYS.get(f"{parent}.{name}", KEYS.get(name))
    if known is not None:
        return known
    match default:
        case bool():
            return {"type": "boolean"}
        case int():
            return _at_least(0)
        case str():
            return TEXT
        case list():
            return _list_of(MANIFEST)
        case dict() if default:
            return _object({key: _shape(each, key, name) for key, each in default.items()})
        case _:
            return MANIFEST


def _object(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


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


def values_schema() -> str:
    """Return the JSON Schema of the chart's values."""
    models = _Models.model_json_schema(schema_generator=_Plain)
    keys = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    values = {key: _shape(default, key) for key, default in keys.items()}
    common = {key: {"$ref": f"#/properties/pods/properties/{key}"} for key in values["pods"]["properties"]}
    for part in _PROCESSES:
        own = values[part]["properties"]
        values[part] = _object({**own, **(common if part != "pods" else {}), "config": models["properties"][part]})
    values["prefill"] = values["decode"] = {"$ref": "#/properties/workers"}
    values["autoscaling"]["properties"]["policy"] = models["properties"]["policy"]
    values["global"]["additionalProperties"] = True  # charts that hold this one have keys of their own there
    schema = {"$schema": _Plain.schema_dialect, "$defs": models["$defs"], **_object(values)}
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(values_schema(), encoding="utf-8")
