"""Results as JSON, and as tables that fit where they are printed: a header is never cut.

Where not all columns fit, each row becomes a block of lines. Output that is no terminal gets lines of 100 columns.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import chain, zip_longest
from math import isfinite
from textwrap import wrap
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_WIDTH = 100  # columns of output that is no terminal
_NAME = 40  # of a run that heads a line; a longer one wraps
_WRAPPED = 24  # cells that a column whose cells wrap gets at least
_MARGIN = 2  # blanks between columns
_SECONDS = re.compile(r"(?<!_per)_s\b")  # at the end of a field's name
_LONG_S = 10.0  # from here on, times are shown in seconds, shorter ones in milliseconds


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    legend: str = ""  # unit, or what the numbers are
    is_text: bool = False  # from the left; numbers are aligned at the right
    wraps: bool = False  # its cells may take several lines


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows under columns, and notes below them."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [self._width(place) for place in range(len(self.columns))]
        if self.title:
            yield Text(self.title)
        if sum(widths) + _MARGIN * (len(widths) - 1) > options.max_width:
            yield from self._blocks(options.max_width)
        else:
            yield self._table(widths)
        if legends := [f"{column.name}: {column.legend}" for column in self.columns if column.legend]:
            yield Text("; ".join(legends), style="dim")
        yield from map(Text, self.notes)

    def _width(self, place: int) -> int:
        column, cells = self.columns[place], max((cell_len(row[place]) for row in self.rows), default=0)
        header = max(map(cell_len, column.name.splitlines()), default=0)
        return max(header, min(cells, _WRAPPED) if column.wraps else cells)

    def _table(self, widths: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False)
        for column, width in zip(self.columns, widths, strict=True):
            justify: Literal["left", "right"] = "left" if column.is_text else "right"
            table.add_column(Text(column.name), justify=justify, no_wrap=not column.wraps, min_width=width)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def _blocks(self, max_width: int) -> Iterator[Text]:
        names = [column.name.replace("\n", " ") for column in self.columns]
        longest = max(map(cell_len, names))
        words = [word for row in self.rows for cell in row for word in cell.split()]
        fits = longest + _MARGIN + max(map(cell_len, words), default=0) <= max_width  # else words would be cut
        for row in self.rows:
            yield Text("")
            for name, cell in zip_longest(names, row, fillvalue=""):
                yield from [Text(f"{name:{longest}}  {cell}")] if fits else map(Text, filter(None, (name, cell)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other, one row a quantity, where all of them fit; else one row a run.

    Then what is the same in all runs stands above, and quantities that do not fit beside the others get a table of
    their own.
    """

    title: str
    runs: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title)
        left = max((cell_len(name) for name, _ in self.rows), default=0)
        widths = [max(map(cell_len, (run, *cells))) for run, *cells in zip(self.runs, *self._cells(), strict=True)]
        if left + sum(widths) + _MARGIN * len(widths) <= options.max_width:
            columns = (Column("", is_text=True), *map(Column, self.runs))
            yield Sheet("", columns, [(name, *cells) for name, cells in self.rows])
        elif len(self.runs) == 1:
            yield from map(Text, (*self.runs, *(f"{name}: {cell}" for name, (cell,) in self.rows)))
        else:
            yield from self._runs_as_rows(options.max_width)

    def _cells(self) -> Iterator[Sequence[str]]:
        return (cells for _, cells in self.rows)

    def _runs_as_rows(self, max_width: int) -> Iterator[Text | Sheet]:
        same = [f"{name}: {cells[0]}" for name, cells in self.rows if len(set(cells)) == 1]
        if same:
            yield Text(f"In all runs: {'; '.join(same)}")
        longest = max(map(cell_len, self.runs))
        head = Column("", is_text=True, wraps=longest > _NAME)
        tables: list[list[tuple[Column, Sequence[str]]]] = []
        left = 0
        for name, cells in self.rows:
            if len(set(cells)) == 1:
                continue
            room = max(map(cell_len, (*cells, *name.split())))
            column = Column("\n".join(wrap(name, room, break_long_words=False, break_on_hyphens=False)))
            if not tables or room + _MARGIN > left:
                tables.append([])
                left = max_width - min(longest, _NAME)
            left -= room + _MARGIN
            tables[-1].append((column, cells))
        for table in tables or [[]]:
            columns = [head, *(column for column, _ in table)]
            yield Text("")
            yield Sheet("", columns, list(zip(self.runs, *(cells for _, cells in table), strict=True)))


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
