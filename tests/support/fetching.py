"""What a process of `pdserve models fetch` comes to."""

import subprocess
from pathlib import Path

LIMIT_S = 60
Process = subprocess.Popen[str]


def done(process: Process) -> Path:
    """Return the path that a process prints at its end."""
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return Path(out.strip())


def refused(process: Process) -> str:
    """Return the one line that a process ends with, less what came before."""
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, err
    return err.splitlines()[-1]
