"""Tables that fit where they are printed: a header is never cut.

Where not all columns fit, the least important ones are left out and named below the table. Where not even the most
important ones fit, each row becomes a block of lines. Output that is no terminal gets every column.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000  # columns of output that is no terminal
_MARGIN = 3  # beside a column: two blanks and a line


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    legend: str = ""  # unit, or what the numbers are
    rank: int = 0  # 0 is never left out; the highest goes first
    is_text: bool = False  # from the left; numbers are aligned at the right


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows under columns, and what is said below them."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default=())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._fitting(options.max_width)
        if self.title:
            yield Text(self.title)
        if shown is None:
            yield from self._blocks()
        else:
            yield self._table(shown)
        kept = range(len(self.columns)) if shown is None else shown
        legends = [f"{self.columns[i].name}: {self.columns[i].legend}" for i in kept if self.columns[i].legend]
        if legends:
            yield Text("; ".join(legends), style="dim")
        if left_out := [column.name for i, column in enumerate(self.columns) if i not in kept]:
            yield Text(f"not enough room for: {', '.join(left_out)}", style="dim")
        yield from map(Text, self.notes)

    def _fitting(self, width: int) -> list[int] | None:
        """Return the columns that fit; None where the most important ones do not."""
        widths = [
            max(map(cell_len, (column.name, *(row[place] for row in self.rows)))) + _MARGIN
            for place, column in enumerate(self.columns)
        ]
        shown = list(range(len(self.columns)))
        while sum(widths[place] for place in shown) + 1 > width:
            last = max(shown, key=lambda place: (self.columns[place].rank, place))
            if not self.columns[last].rank:
                return None
            shown.remove(last)
        return shown

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(box=box.SQUARE)
        for place in shown:
            column = self.columns[place]
            table.add_column(Text(column.name), justify="left" if column.is_text else "right", no_wrap=True)
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
        left = max((cell_len(name) for name, _ in self.rows), default=0) + _MARGIN + 1
        widths = [max(map(cell_len, (run, *(cells[i] for _, cells in self.rows)))) for i, run in enumerate(self.runs)]
        begin = 0
        while begin < len(self.runs):
            end, used = begin + 1, left + widths[begin] + _MARGIN
            while end < len(self.runs) and used + widths[end] + _MARGIN <= options.max_width:
                used += widths[end] + _MARGIN
                end += 1
            yield self._table(begin, end)
            begin = end

    def _table(self, begin: int, end: int) -> Table:
        table = Table("", box=box.SQUARE)
        for run in self.runs[begin:end]:
            table.add_column(Text(run), justify="right", overflow="fold")
        for name, cells in self.rows:
            table.add_row(Text(name), *map(Text, cells[begin:end]))
        return table


def output() -> Console:
    """Return standard output; where it is no terminal, and nobody says how wide it is, lines may have any length."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUNDED
    return console
