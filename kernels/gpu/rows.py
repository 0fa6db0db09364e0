"""One line of a table, and which lines were asked for."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line asked for."""

    only: str = ""
    flex: bool = False

    def wants(self, name: str) -> bool:
        """Return whether the case of that name is to run."""
        return self.only in name


@dataclass(frozen=True, slots=True)
class Row:
    """A check's or a benchmark's outcome."""

    name: str
    time_us: float | None = None
    rate: float | None = None
    unit: str = ""
    peers: dict[str, float] = field(default_factory=dict)  # name -> microseconds
    note: str = ""
    failed: bool = False
