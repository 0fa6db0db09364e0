"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it serves, but not as well as it could, or not for long
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result: what was looked at, what was seen, and what to do where it is not ok."""

    name: str
    level: Level
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Finding:
    return Finding(name, Level.OK, seen)


def warning(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Level.WARNING, seen, remedy)


def failed(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Level.FAILED, seen, remedy)
