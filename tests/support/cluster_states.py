"""The state of a cluster, as `pdserve up` writes it, and what is printed of it."""

import io
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from pdserve.launch.folder import ClusterState


def cluster_state(secret_file: Path = Path("secret"), **more: Any) -> ClusterState:  # noqa: ANN401
    """Return the state of a cluster of this process, without processes unless some are given."""
    given = {"name": "tests", "endpoint": "127.0.0.1:1", "admin": "127.0.0.1:2", "model": "m", "ready": True} | more
    return ClusterState(**{"supervisor_pid": os.getpid(), "secret_file": secret_file, "processes": (), **given})


def printed(shown: object, width: int = 300) -> str:
    """Return what a terminal of this width shows."""
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
