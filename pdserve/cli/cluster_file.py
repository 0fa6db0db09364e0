"""A cluster in a file: what `pdserve up --config` reads, with everything that each of its processes takes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from pdserve.base.yaml_models import read_model
from pdserve.launch.plan import MAX_FRONTENDS, PER_PROCESS
from pdserve.router.config import RouterConfig
from pdserve.settings.autoscaler import AutoscalerConfig
from pdserve.settings.config import ProcessConfig, WorkerConfig

# Settings of the router that are the cluster's own, by their names there.
OF_CLUSTER = {
    "host": "host",
    "port": "router_port",
    "http_port": "http_port",
    "internal_host": "internal_host",
    "internal_port": "internal_port",
}


def _model(_name: str, **fields: Any) -> type[BaseModel]:  # noqa: ANN401 - pydantic's pairs of type and field
    return create_model(_name, __config__=ConfigDict(extra="forbid"), **fields)


def _section(cls: type[ProcessConfig], without: Collection[str] = PER_PROCESS, **more: Any) -> type[BaseModel]:  # noqa: ANN401
    """Return a model with the settings of a process, none of which is required."""
    fields = {
        name: (field.rebuild_annotation() | None, Field(None, description=field.description))
        for name, field in cls.model_fields.items()
        if name not in without
    }
    return _model(cls.kind, **more, **fields)


_Worker = _section(
    WorkerConfig, replicas=(int | None, Field(None, ge=0, description="Workers with which the cluster begins."))
)
_Workers = _model(
    "workers",
    prefill=(_Worker, Field(_Worker(), description="Workers that compute prompts.")),
    decode=(_Worker, Field(_Worker(), description="Workers that decode.")),
    mixed=(_Worker, Field(_Worker(), description="Workers that do both.")),
)
_Router, _Autoscaler = _section(RouterConfig), _section(AutoscalerConfig, (*PER_PROCESS, "policy_resource"))
ClusterFile = _model(
    "cluster",
    model=(str | None, Field(None, description="A path, or a name from the catalog or the Hugging Face hub.")),
    served_model_name=(str | None, Field(None, min_length=1, description="Name of the model in requests.")),
    name=(str | None, Field(None, description="Name of the cluster on this machine.")),
    max_workers=(int | None, Field(None, ge=1, description="Workers that there may be at once.")),
    num_frontends=(
        int | None,
        Field(None, ge=0, le=MAX_FRONTENDS, description="Processes that serve clients; 0: the router does so itself."),
    ),
    tls=(bool | None, Field(None, description="Certificates made for this run, inside and for clients.")),
    router=(_Router, Field(_Router(), description="Settings of the router.")),
    workers=(_Workers, Field(_Workers(), description="Settings of the workers, by their role.")),
    autoscaler=(
        _Autoscaler,
        Field(_Autoscaler(), description="Settings of the autoscaler. One runs if a policy is set."),
    ),
)


def read_cluster(path: Path) -> dict[str, Any]:
    """Return what a file sets, by the names of `ClusterSpec`, `replicas` by role, and `policy`.

    ConfigError names file, line, field and limit of each fault.
    """
    given = read_model(ClusterFile, path).model_dump(exclude_none=True)
    router, workers, autoscaler = (given.pop(key) for key in ("router", "workers", "autoscaler"))
    own = {field: router.pop(key) for key, field in OF_CLUSTER.items() if key in router}
    replicas = {role: settings.pop("replicas") for role, settings in workers.items() if "replicas" in settings}
    flags = {"router_flags": router, "role_flags": workers, "autoscaler_flags": autoscaler}
    return {**given, **own, **flags, "replicas": replicas, "policy": autoscaler.pop("policy", None)}
