"""A cluster in a file: what `pdserve up --config` reads, with everything that each of its processes takes."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from pdserve.base.errors import ConfigError
from pdserve.base.yaml_models import FieldError, read_model
from pdserve.launch.plan import MAX_FRONTENDS, PER_PROCESS
from pdserve.router.config import EndpointConfig, ModelSettings, RouterConfig
from pdserve.settings.autoscaler import AutoscalerConfig
from pdserve.settings.config import WorkerConfig
from pdserve.settings.process import ProcessConfig

# Flags of `pdserve up` that say something of one model.
ONE_MODELS_FLAGS = (
    *("model", "served_model_name", "served_model_aliases", "prefill", "decode", "mixed", "policy", "max_workers"),
    *("workers_secret_file", "profile"),
)
# Settings of the router that are the cluster's own, by their names there.
OF_CLUSTER = {
    "host": "host",
    "port": "router_port",
    "http_port": "http_port",
    "internal_host": "internal_host",
    "internal_port": "internal_port",
}


def _model(_name: str, _check: Callable[[Any], Any] | None = None, /, **fields: Any) -> type[BaseModel]:  # noqa: ANN401
    """Return a model of fields, which are pydantic's pairs of type and field; `_check` raises FieldError."""
    checks: dict[str, Any] = {} if _check is None else {"check": model_validator(mode="after")(_check)}
    return create_model(_name, __config__=ConfigDict(extra="forbid"), __validators__=checks, **fields)


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
_OF_A_MODEL: dict[str, Any] = {
    "model": (str | None, Field(None, description="A path, or a name from the catalog or the Hugging Face hub.")),
    "served_model_name": (str | None, Field(None, min_length=1, description="Name of the model in requests.")),
    "max_workers": (int | None, Field(None, ge=1, description="Workers that there may be at once.")),
    "workers": (_Workers, Field(_Workers(), description="Settings of the workers, by their role.")),
    "autoscaler": (
        _Autoscaler,
        Field(_Autoscaler(), description="Settings of the autoscaler. One runs if a policy is set."),
    ),
}
# Settings of a router that say nothing of the address at which clients of all models are served.
_OF_ITS_ROUTER = (RouterConfig.model_fields.keys() - EndpointConfig.model_fields.keys() - {"internal_host"}) | (
    ModelSettings.model_fields.keys() | {"metrics_port", "health_port"}
)
_ModelRouter = _section(RouterConfig, {*PER_PROCESS, *(RouterConfig.model_fields.keys() - _OF_ITS_ROUTER)})
_Entry = _model(
    "model",
    **_OF_A_MODEL | {"model": (str, Field(min_length=1, description=_OF_A_MODEL["model"][1].description))},
    router=(_ModelRouter, Field(_ModelRouter(), description="Settings of its router.")),
)


def _check_several(file: Any) -> Any:  # noqa: ANN401 - the model that is made below
    """Raise FieldError for what cannot be said of several models at once."""
    if file.models is None:
        return file
    for key in _OF_A_MODEL:
        if key in file.model_fields_set:
            raise FieldError((key,), "goes into each of `models`, where there are several")
    for key in ("served_model_aliases", "internal_port", "metrics_port", "health_port"):
        if getattr(file.router, key) is not None:
            raise FieldError(("router", key), "goes into the section router of each of `models`")
    if file.num_frontends == 0:
        raise FieldError(("num_frontends",), "0 is refused: frontends serve several models")
    names: set[str] = set()
    for place, each in enumerate(file.models):
        name = each.served_model_name
        if name in names:
            raise FieldError(("models", place, "served_model_name"), f"{name!r} is the name of two")
        names |= {name} - {None}
    _check_ports(file)
    return file


def _check_ports(file: Any) -> None:  # noqa: ANN401
    """Raise FieldError where two processes are to listen on the same port."""
    taken: dict[int, str] = {}

    def take(part: BaseModel, place: tuple[str | int, ...]) -> None:
        for key, value in part:
            here = (*place, key)
            if isinstance(value, BaseModel):
                take(value, here)
            elif key.endswith("port") and value:
                if value in taken:
                    raise FieldError(here, f"{value} is refused: it is the port of {taken[value]}")
                taken[value] = ".".join(map(str, here))

    take(file.router, ("router",))
    for place, each in enumerate(file.models):
        take(each, ("models", place))


ClusterFile = _model(
    "cluster",
    _check_several,
    **_OF_A_MODEL,
    name=(str | None, Field(None, description="Name of the cluster on this machine.")),
    num_frontends=(
        int | None,
        Field(None, ge=0, le=MAX_FRONTENDS, description="Processes that serve clients; 0: the router does so itself."),
    ),
    tls=(bool | None, Field(None, description="Certificates made for this run, inside and for clients.")),
    router=(_Router, Field(_Router(), description="Settings of the router; of several models, of all routers.")),
    models=(
        list[_Entry] | None,  # type: ignore[valid-type]
        Field(None, min_length=1, description="Several models at one address, in place of one."),
    ),
)


def read_clusters(path: Path) -> list[dict[str, Any]]:
    """Return what a file sets for each of its models, by the names of `ClusterSpec`, `replicas` by role, and `policy`.

    ConfigError names file, line, field and limit of each fault.
    """
    given = read_model(ClusterFile, path).model_dump(exclude_none=True)
    models = given.pop("models", [{}])
    return [_settings({**given, **each, "router": {**given["router"], **each.get("router", {})}}) for each in models]


def check_flags_of_several(flags: Collection[str], *, is_on_ray: bool) -> None:
    """Raise ConfigError for flags that go with one model alone."""
    if is_on_ray:
        raise ConfigError("--on: ray goes with one model so far")
    for key in ONE_MODELS_FLAGS:
        if key in flags:
            raise ConfigError(f"--{key.replace('_', '-')}: goes with one model; the file has several")


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    router, workers, autoscaler = (given.pop(key) for key in ("router", "workers", "autoscaler"))
    own = {field: router.pop(key) for key, field in OF_CLUSTER.items() if key in router}
    replicas = {role: settings.pop("replicas") for role, settings in workers.items() if "replicas" in settings}
    flags = {"router_flags": router, "role_flags": workers, "autoscaler_flags": autoscaler}
    return {**given, **own, **flags, "replicas": replicas, "policy": autoscaler.pop("policy", None)}
