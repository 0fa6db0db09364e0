"""Results as JSON, and as tables that fit where they are printed: a header is never cut.

Where not all columns fit, short headers are used and explained, then the least important columns are left out and named
below the table. Where not even the most important ones fit, each row becomes a block of lines. Output that is no
terminal gets every column.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import zip_longest
from math import isfinite
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000  # columns of output that is no terminal
_WRAPPED = 24  # cells that a column whose cells wrap gets at least
_MARGIN = 2  # blanks between columns


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    legend: str = ""  # unit, or what the numbers are
    rank: int = 0  # 0 is never left out; the highest goes first
    is_text: bool = False  # from the left; numbers are aligned at the right
    short: str = ""  # a header for where there is little room
    wraps: bool = False  # its cells may take several lines


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows under columns, and notes below them."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = range(len(self.columns))
        headers = [column.name for column in self.columns]
        if self._width(headers, every) > options.max_width:
            headers = [column.short or column.name for column in self.columns]
        shown = self._fitting(headers, options.max_width)
        kept = every if shown is None else shown
        if self.title:
            yield Text(self.title)
        if shown is None:
            yield from self._blocks()
        else:
            yield self._table(headers, shown)
            explained = [f"{headers[i]}: {self.columns[i].name}" for i in kept if headers[i] != self.columns[i].name]
            if explained:
                yield Text("; ".join(explained), style="dim")
        if legends := [f"{self.columns[i].name}: {self.columns[i].legend}" for i in kept if self.columns[i].legend]:
            yield Text("; ".join(legends), style="dim")
        if left_out := [column.name for i, column in enumerate(self.columns) if i not in kept]:
            yield Text(f"not enough room for: {', '.join(left_out)}", style="dim")
        yield from map(Text, self.notes)

    def _width(self, headers: Sequence[str], shown: Sequence[int]) -> int:
        return sum(_MARGIN + self._column_width(headers, place) for place in shown) - _MARGIN

    def _column_width(self, headers: Sequence[str], place: int) -> int:
        cells = max((cell_len(row[place]) for row in self.rows), default=0)
        return max(cell_len(headers[place]), min(cells, _WRAPPED) if self.columns[place].wraps else cells)

    def _fitting(self, headers: Sequence[str], width: int) -> list[int] | None:
        """Return the columns that fit; None where the most important ones do not."""
        shown = list(range(len(self.columns)))
        while self._width(headers, shown) > width:
            last = max(shown, key=lambda place: (self.columns[place].rank, place))
            if not self.columns[last].rank:
                return None
            shown.remove(last)
        return shown

    def _table(self, headers: Sequence[str], shown: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False)
        for place in shown:
            column, width = self.columns[place], self._column_width(headers, place)
            justify: Literal["left", "right"] = "left" if column.is_text else "right"
            table.add_column(Text(headers[place]), justify=justify, no_wrap=not column.wraps, min_width=width)
        for row in self.rows:
            table.add_row(*(Text(row[place]) for place in shown))
        return table

    def _blocks(self) -> Iterator[Text]:
        names = [column.name for column in self.columns]
        longest = max(map(cell_len, names))
        for row in self.rows:
            yield Text("")
            yield from (Text(f"{name:{longest}}  {cell}") for name, cell in zip_longest(names, row, fillvalue=""))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One column a run, one row a quantity; runs that do not fit beside the others get a table of their own."""

    title: str
    runs: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title)
        left = max((cell_len(name) for name, _ in self.rows), default=0)
        widest = max(map(cell_len, (*self.runs, *(cell for _, cells in self.rows for cell in cells))), default=0)
        count = max(1, (options.max_width - left) // (widest + _MARGIN))
        for begin in range(0, len(self.runs), count):
            shown = slice(begin, begin + count)
            columns = (Column("", is_text=True), *map(Column, self.runs[shown]))
            yield Sheet("", columns, [(name, *cells[shown]) for name, cells in self.rows])


def output() -> Console:
    """Return standard output; where it is no terminal, and no width is set, lines may have any length."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUNDED
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
def counted(console: Console, name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar for the length of the block; calling what is yielded advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)
