"""An autoscaler's configuration: its process, not its policy."""

from pathlib import Path

from pydantic import Field

from pdserve.config import IDENTITY_HELP, ProcessConfig


class AutoscalerConfig(ProcessConfig):
    """Settings of an autoscaler. They never change after its start; its policy is read again whenever it changes."""

    kind = "autoscaler"

    policy: Path = Field(description="The policy that is followed, YAML or JSON.")
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
    identity_dir: Path | None = Field(None, description=IDENTITY_HELP)
