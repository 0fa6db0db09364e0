"""How much of a file this process has mapped into memory."""

from pathlib import Path


def mapped_kb(path: Path, field: str = "Rss") -> int:
    """Return how much of the file this process has in memory; 0 where it maps none of it."""
    lines, total, inside = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines(), 0, False
    for line in lines:
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith(f"{field}:"):
            total += int(line.split()[1])
    return total
