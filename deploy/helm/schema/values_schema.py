"""Writes values.schema.json of the chart: its own keys, with the settings of processes and policies from their models.

Helm refuses values that the schema does not allow, and names them. Defaults are in values.yaml alone.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema

from pdserve.autoscaler.config import AutoscalerConfig
from pdserve.autoscaler.schema import Policy
from pdserve.autoscaler.section import Section
from pdserve.config import ProcessConfig, WorkerConfig
from pdserve.router.config import RouterConfig

FILE = Path(__file__).parents[1] / "pdserve" / "values.schema.json"

# Settings that the chart decides, or has a key of its own for.
OF_THE_CHART = {
    *("model", "served_model_name", "secret_file", "identity_dir", "ssl_certfile", "ssl_keyfile", "api_keys_file"),
    *("host", "port", "http_host", "http_port", "internal_host", "internal_port"),
    *("handoff_host", "handoff_port", "handoff_rdma_devices"),
    *("health_host", "health_port", "metrics_host", "metrics_port", "drain_timeout_s"),
    *("role", "routers", "router_id", "worker_id", "launch_id", "incarnation", "termination_message_file"),
    *("tensor_parallel_size", "policy", "policy_resource", "name"),
}

Manifest = dict[str, Any]  # a part of a manifest, which Kubernetes checks
Names = dict[str, str]
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?([EPTGMk]i?)?$")]


def _optional(schema: dict[str, Any]) -> None:
    schema.pop("required", None)


class Part(BaseModel):
    """Keys of the chart, of which any may be missing where another part has them."""

    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, json_schema_extra=_optional)


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), json_schema_extra=_optional)


def _without(cls: type[BaseModel], base: type[BaseModel], names: Collection[str]) -> Any:  # noqa: ANN401 - a model
    """Return a model of the fields of `cls` whose names are not among `names`."""
    fields: Any = {name: (field.annotation, field) for name, field in cls.model_fields.items() if name not in names}
    return create_model(f"{cls.__name__}Values", __base__=base, __doc__=cls.__doc__, **fields)


ProcessValues = _without(ProcessConfig, _Settings, OF_THE_CHART)
RouterValues = _without(RouterConfig, _Settings, OF_THE_CHART)
WorkerValues = _without(WorkerConfig, _Settings, OF_THE_CHART)
OperatorValues = _without(AutoscalerConfig, _Settings, OF_THE_CHART)
PolicyValues = _without(Policy, Section, {"api_version", "kind", "actuator"})


class Image(Part):
    repository: str
    tag: str
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
    pull_policy: Literal["Always", "IfNotPresent", "Never"]


class TopologySpread(Part):
    max_skew: Annotated[int, Field(ge=1)]
    topology_key: str
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]


class DisruptionBudget(Part):
    enabled: bool
    max_unavailable: Count | Annotated[str, Field(pattern=r"^\d+%$")]


class Pods(Part):
    image: Image
    replicas: Count
    config: ProcessValues
    extra_args: list[str]
    extra_env: list[Manifest]
    resources: Manifest
    drain_timeout_seconds: Count
    startup_timeout_seconds: Annotated[int, Field(ge=2)]
    node_selector: Names
    tolerations: list[Manifest]
    affinity: Manifest
    topology_spread: TopologySpread
    priority_class_name: str
    runtime_class_name: str
    strategy: Manifest
    pod_annotations: Names
    pod_labels: Names
    extra_volumes: list[Manifest]
    extra_volume_mounts: list[Manifest]
    pod_disruption_budget: DisruptionBudget


class Service(Part):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    annotations: Names
    load_balancer_source_ranges: list[str]


class Ingress(Part):
    enabled: bool
    port: Literal["http", "grpc"]
    class_name: str
    annotations: Names
    host: str
    tls_secret: str


class Route(Part):
    enabled: bool
    kind: Literal["GRPCRoute", "HTTPRoute"]
    annotations: Names
    parent_refs: list[Manifest]
    hostnames: list[str]


class Router(Pods):
    config: RouterValues
    pre_stop_sleep_seconds: Count
    service: Service
    ingress: Ingress
    route: Route


class Operator(Pods):
    config: OperatorValues
    watch_nodes: bool


class Devices(Part):
    count: Count
    resource: str


class Rdma(Part):
    enabled: bool
    resource_name: str
    count: Annotated[int, Field(ge=1)]
    networks: str
    devices: list[Annotated[str, Field(pattern=r"^\w+:\d+$")]]
    ipc_lock: bool


class Workers(Pods):
    config: WorkerValues
    devices: Devices
    shared_memory: Quantity
    rdma: Rdma


class Volume(Part):
    claim_name: str
    sub_path: str


class ModelImage(Part):
    reference: str
    pull_policy: Literal["Always", "IfNotPresent", "Never"]


class Hub(Part):
    repository: str
    revision: str
    token_secret: Names
    size_limit: Quantity


class Model(Part):
    path: Annotated[str, Field(min_length=1)]
    served_name: str
    source: Literal["catalog", "builtIn", "pvc", "image", "hub"]
    pvc: Volume
    image: ModelImage
    hub: Hub


class Existing(Part):
    existing_secret: str


class PublicTls(Existing):
    from_: Annotated[Literal["secret", "certManager", "chart"], Field(alias="from")]
    dns_names: list[str]
    issuer_ref: Names
    duration_days: Annotated[int, Field(ge=1)]


class RoleSecrets(Part):
    router: str
    worker: str
    operator: str


class Identity(Part):
    from_: Annotated[Literal["none", "secret", "certManager"], Field(alias="from")]
    trust_domain: Annotated[str, Field(pattern=r"^[a-z0-9._-]+$")]
    issuer_ref: Names
    existing_secrets: RoleSecrets


class Tls(Part):
    public: PublicTls
    identity: Identity


class Autoscaling(Part):
    by: Literal["none", "pdserve", "hpa", "keda"]
    follow: Literal["desired", "waiting"]
    policy_as: Literal["ConfigMap", "AutoscalingPolicy"]
    policy: PolicyValues
    waiting_per_replica: Annotated[int, Field(ge=1)]
    prometheus: str
    behavior: Manifest


class KubernetesApi(Part):
    to: list[Manifest]
    ports: list[Port]


class NetworkPolicy(Part):
    enabled: bool
    clients: list[Manifest]
    prometheus: list[Manifest]
    dns: list[Manifest]
    kubernetes_api: KubernetesApi
    extra_egress: list[Manifest]
    extra_ingress: list[Manifest]


class Rules(Part):
    enabled: bool


class Dashboards(Rules):
    labels: Names
    annotations: Names


class Monitoring(Part):
    metrics: Literal["none", "PodMonitor", "ServiceMonitor"]
    interval: Annotated[str, Field(pattern=r"^\d+(ms|s|m)$")]
    labels: Names
    rules: Rules
    dashboards: Dashboards


class PodSecurity(Part):
    run_as_user: Annotated[int, Field(ge=1)]
    run_as_group: Annotated[int, Field(ge=1)]
    fs_group: Annotated[int, Field(ge=1)]


class Question(Part):
    prompt: str
    max_tokens: Annotated[int, Field(ge=1)]


class Global(Part):
    model_config = ConfigDict(extra="allow")  # charts that hold this one have keys of their own here

    image_registry: str


class Values(Part):
    """Values of the chart pdserve."""

    name_override: str
    fullname_override: str
    global_: Annotated[Global, Field(alias="global")]
    image_pull_secrets: list[Names]
    model: Model
    secret: Existing
    keys: Existing
    tls: Tls
    pods: Pods
    router: Router
    workers: Workers
    prefill: Workers
    decode: Workers
    operator: Operator
    autoscaling: Autoscaling
    network_policy: NetworkPolicy
    monitoring: Monitoring
    pod_security: PodSecurity
    test: Question
    extra_objects: list[Manifest]


class _Plain(GenerateJsonSchema):
    """As Helm reads it: an older draft. Titles repeat the keys, and defaults are the processes' own."""

    schema_dialect = "http://json-schema.org/draft-07/schema#"

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def default_schema(self, schema: Any) -> Any:  # noqa: ANN401 - pydantic's
        return self.generate_inner(schema["schema"])


def values_schema() -> str:
    """Return the JSON Schema of the chart's values."""
    schema = Values.model_json_schema(schema_generator=_Plain)
    return json.dumps({"$schema": _Plain.schema_dialect, **schema}, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(values_schema(), encoding="utf-8")
