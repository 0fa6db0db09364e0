"""A watcher of pods' configuration."""

from pathlib import Path

from pydantic import Field

from pdserve.config import ProcessConfig


class WatcherConfig(ProcessConfig):
    """Settings of a watcher of pods. It watches the namespace that it runs in, or that KUBECONFIG names."""

    kind = "watcher"

    routers: tuple[str, ...] = Field(
        min_length=1, description="Internal addresses of all routers, host:port; a host may have several addresses."
    )
    secret_file: Path = Field(description="The cluster's shared secret; its owner and group alone may read it.")
