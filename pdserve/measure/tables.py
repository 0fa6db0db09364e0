"""Results as JSON, and as tables that fit where they are printed.

Output that is no terminal gets lines of 100 columns.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from itertools import accumulate, chain
from math import isfinite

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDTH = 100  # columns of output that is no terminal
_MARGIN = 2  # blanks between columns
_SECONDS = re.compile(r"(?<!_per)_s\b")  # at the end of a field's name
_LONG_S = 10.0  # from here on, times are shown in seconds, shorter ones in milliseconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other, one row a quantity; as many tables below each other as the runs need."""

    title: str
    runs: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title)
        names = ["", *(name for name, _ in self.rows)]
        columns = [[run, *cells] for run, *cells in zip(self.runs, *(cells for _, cells in self.rows), strict=True)]
        room = options.max_width - min(_width(names), options.max_width // 2)
        while columns:
            ends = accumulate(_width(column) + _MARGIN for column in columns)
            count = max(1, sum(end <= room for end in ends))
            yield _table(names, columns[:count])
            columns = columns[count:]


def _width(cells: Iterable[str]) -> int:
    return max(map(cell_len, cells))


def _table(names: Sequence[str], columns: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(overflow="fold")
    for run, *_ in columns:
        table.add_column(Text(run), justify="right", overflow="fold")
    for name, *cells in list(zip(names, *columns, strict=True))[1:]:
        table.add_row(*map(Text, (name, *cells)))
    return table


def compared(results: Iterable[object], title: str = "") -> Comparison:
    """Return one column a result, headed by its `name`, and one row a field, as in JSON. Lists are left out."""
    columns = [dict(_rows("", _plain(each))) for each in results]
    names = [column.pop("name", "") for column in columns]
    rows = {row: [column.get(row, "-") for column in columns] for row in dict.fromkeys(chain(*columns))}
    shown = [(row, cells) for row, cells in rows.items() if set(cells) != {"-"} or not _has_parts(row, rows)]
    return Comparison(title, names, shown)


def _has_parts(row: str, rows: Iterable[str]) -> bool:
    """Return whether a field that some results lack is a row of several numbers in others."""
    return any(other.startswith(f"{row}: ") for other in rows)


def _rows(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the rows of a field: one of a value, one of several numbers or counts, else those of all fields within."""
    label = _SECONDS.sub("", path).replace("_", " ").strip()
    match value:
        case dict() if path and all(type(each) is int for each in value.values()):
            yield label, ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
        case dict() if path and all(isinstance(each, int | float) for each in value.values()):
            yield f"{label}: {' / '.join(value).replace('_', ' ')}", _numbers(path, *value.values())
        case dict():
            for name, each in value.items():
                yield from _rows(f"{path} {name}", each)
        case list():
            pass
        case bool() | None:
            yield label, {True: "yes", False: "no", None: "-"}[value]
        case int() | float():
            yield label, _numbers(path, value)
        case _:
            yield label, str(value) or "-"


def _numbers(path: str, *values: float) -> str:
    """Return numbers in the unit that the end of their field's name says."""
    if "bytes" in path:
        return " / ".join(decimal(round(value)) for value in values)
    factor, unit = 1.0, ""
    if _SECONDS.search(path):
        factor, unit = (1.0, " s") if max(values) >= _LONG_S else (1e3, " ms")
    shown = (factor * value for value in values)
    return " / ".join(f"{each:.0f}" if abs(each) >= 100 else f"{each:.3g}" for each in shown) + unit


def output() -> Console:
    """Return standard output; where it is no terminal, and no width is set, lines have 100 columns at most."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def as_json(value: object) -> str:
    """Return dataclasses, mappings and sequences as JSON; what is infinite or undefined is null."""
    return json.dumps(_plain(value), indent=1) + "\n"


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


@contextmanager
def counted(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error for the length of the block; calling what is yielded advances it by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
