"""Settings of the autoscaler, and of the watcher of pods."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from pdserve.base.errors import ConfigError
from pdserve.settings.process import ProcessConfig


class AutoscalerConfig(ProcessConfig):
    """Settings of an autoscaler. They never change after its start; its policy is read again whenever it changes."""

    kind = "autoscaler"

    policy: Path | None = Field(None, description="The policy that is followed, YAML or JSON.")
    policy_resource: str | None = Field(
        None,
        pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$",
        description="The policy that is followed, as an AutoscalingPolicy of Kubernetes: namespace/name.",
    )
    name: str = Field("default", description="Which of this machine's clusters is scaled, unless routers are named.")
    routers: tuple[str, ...] = Field(
        (),
        description="Internal addresses of all routers of a cluster, host:port. Each address that a host's name "
        "leads to is a router, with a router_id of its own.",
    )
    secret_file: Path | None = Field(
        None,
        description="Shared secret of a cluster whose routers are named; its owner and group alone may read it.",
    )

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if (self.policy is None) == (self.policy_resource is None):
            raise ConfigError("policy: either it or policy_resource is required, and not both")
        return self


class WatcherConfig(ProcessConfig):
    """Settings of a watcher of pods. It watches the namespace that it runs in, or that KUBECONFIG names."""

    kind = "watcher"

    routers: tuple[str, ...] = Field(
        min_length=1, description="Internal addresses of all routers, host:port; a host may have several addresses."
    )
    secret_file: Path = Field(description="The cluster's shared secret; its owner and group alone may read it.")
