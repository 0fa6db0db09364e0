"""What the processes of live clusters have logged, for the report of a test that fails."""

from pathlib import Path

MAX_LINES = 40  # of each process

_running: list[Path] = []  # folders of clusters that run


def register(folder: Path) -> None:
    _running.append(folder)


def unregister(folder: Path) -> None:
    _running.remove(folder)


def of_running() -> list[tuple[str, str]]:
    """Return the last lines of every process of every cluster that runs, each with the process's name."""
    return [entry for folder in _running for entry in of_cluster(folder)]


def of_cluster(folder: Path) -> list[tuple[str, str]]:
    """Return the last lines of the cluster's processes, that of `pdserve up` first, each with the process's name."""
    logs = [folder / "up.log", *sorted(folder.glob("pdserve/*/logs/*.log"))]
    return [(path.stem, _tail(path)) for path in logs if path.exists() and path.stat().st_size]


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-MAX_LINES:])
