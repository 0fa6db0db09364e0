"""Further machines of a worker: processes of this one that share nothing with it but loopback, or not even that."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from pdserve.launch.folder import write_secret
from pdserve.launch.plan import flag_arguments

HOST = "127.0.0.1"


@contextmanager
def worker_node(
    folder: Path, model: Path, port: int, enter: Sequence[str] = (), **flags: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Run machine 1 of the worker that listens on this port for the length of the block. Its log is node.log.

    enter: the command that runs another one on that machine.
    """
    own = {
        "master_addr": HOST,
        "master_port": port,
        "node_rank": 1,
        "model": model,
        "secret_file": found if (found := folder / "secret").exists() else write_secret(folder),
    }
    command = [*enter, sys.executable, "-P", "-m", "pdserve", "worker-node", *flag_arguments({**own, **flags})]
    with (folder / "node.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return the ranks that run on a machine beside its first process."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [each for each in children if "pdserve.executor.rank" in each.cmdline()]
