"""What an autoscaler decided lately and why, in a small file that other commands read."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from pdserve.autoscaler.decisions import Decision
from pdserve.base.errors import ConfigError
from pdserve.base.files import write_atomically
from pdserve.base.roles import Role

MAX_ENTRIES = 256  # that are kept


class PoolNow(BaseModel, frozen=True, extra="forbid"):
    """The last decision about a pool."""

    pool: Role
    num_replicas: int
    desired: int
    binds: str
    text: str


class Entry(BaseModel, frozen=True, extra="forbid"):
    """Something that happened."""

    unix_s: float
    text: str


class Record(BaseModel, frozen=True, extra="forbid"):
    """What other commands read."""

    policy: Path
    metrics_address: str  # host:port where it shows its metrics, empty: nowhere
    unix_s: float  # of the last decisions
    pools: tuple[PoolNow, ...]
    entries: tuple[Entry, ...]  # the latest one last


class Journal:
    """Keeps the last decisions that differ from those before them, and what else is worth a line."""

    def __init__(self, path: Path | None, policy: Path) -> None:
        """`path`: where it is written; None: nowhere."""
        self._path = path
        self._policy = policy
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self.metrics_address = ""
        self._before: dict[Role, tuple[object, ...]] = {}

    def news(self, decisions: Sequence[Decision]) -> list[str]:
        """Return the decisions, in words, that differ from the last ones by more than the figures seen."""
        found = []
        for decision in decisions:
            short = (decision.action, decision.num_replicas, decision.desired, decision.binds, bool(decision.refused))
            if self._before.get(decision.pool) != short:
                found.append(decision.text)
            self._before[decision.pool] = short
        return found

    def note(self, text: str) -> None:
        """Keep a line."""
        self._entries.append(Entry(unix_s=time.time(), text=text))

    def write(self, decisions: Sequence[Decision]) -> None:
        """Write what was decided now and lately."""
        if self._path is None:
            return
        record = Record(
            policy=self._policy,
            metrics_address=self.metrics_address,
            unix_s=time.time(),
            pools=tuple(PoolNow.model_validate(each, from_attributes=True) for each in decisions),
            entries=tuple(self._entries),
        )
        with suppress(OSError):  # without it decisions go on, and other commands read an earlier one
            write_atomically(self._path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path) -> Record:
    """Return what an autoscaler wrote; ConfigError where none runs, or one of another version."""
    try:
        return Record.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("no autoscaler runs for this cluster: start one with `pdserve autoscale run`") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(f"{path} was written by another version of pdserve") from error
