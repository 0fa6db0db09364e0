"""Commands that see a file system of their own at a folder: one that is full, or cannot be written."""

import subprocess
from pathlib import Path

import pytest

_ENTER = ("unshare", "--user", "--map-root-user", "--mount")


def mounted(options: str, folder: Path) -> list[str]:
    """Return the command that runs another one with an empty file system of these options at a folder."""
    return _under(f"mount -t tmpfs -o {options} none '{folder}'")


def read_only(folder: Path) -> list[str]:
    """Return the command that runs another one to which a folder and what is below it are read-only."""
    return _under(f"mount --bind '{folder}' '{folder}' && mount -o remount,bind,ro '{folder}'")


def _under(mount: str) -> list[str]:
    if subprocess.run([*_ENTER, "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("needs namespaces for mounts by unprivileged users")
    return [*_ENTER, "sh", "-ec", f'{mount}; exec "$@"', "sh"]
