"""Runs measurements and puts results where they go: tables on standard output, JSON and plots in files.

Whether a file can be written is tried before the work begins.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pdserve.base.errors import CommandError, ConfigError
from pdserve.protocol.refusal import Status

if TYPE_CHECKING:
    from pdserve.measure.html_report import Plot
    from pdserve.measure.outcomes import Summary
    from pdserve.measure.tables import Comparison

Result = TypeVar("Result")

STANDARD_OUTPUT = Path("-")


def writable(flag: str) -> Callable[[Path | None], Path | None]:
    """Return a check of a path to write to: ConfigError unless that can be done. Leaves what is there as it is."""

    def check(path: Path | None) -> Path | None:
        if path is None or (flag == "--json" and path == STANDARD_OUTPUT):
            return path
        try:
            existed = path.exists()
            with path.open("a"):
                pass
            if not existed:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}") from error
        return path

    return check


JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help="Also write the results to this file; -: to standard output, instead of tables.",
        callback=writable("--json"),
    ),
]


HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", help="Also write a report with plots there: one file, readable offline.", callback=writable("--html")
    ),
]


def show(
    json_file: Path | None, runs: Iterable[object], title: str = "", *notes: str, results: object = None
) -> "Comparison":
    """Print runs side by side, and notes below; write the results to the file as JSON, by default the runs.

    For standard output, print the JSON alone. Returns the table.
    """
    from pdserve.measure.tables import as_json, compared, output

    runs = list(runs)
    table, text = compared(runs, title), as_json({"runs": runs} if results is None else results)
    if json_file == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return table
    console = output()
    for each in (table, *notes):
        console.print(each)
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    return table


def draw(html: Path | None, title: str, note: str, table: "Comparison", charts: "Sequence[Plot]") -> None:
    """Write a report with a table and its plots, where one is wanted."""
    from pdserve.measure.html_report import write_page

    if html is not None:
        write_page(html, title, note, table, charts)


def fail_unless_right(runs: "Iterable[Summary]") -> None:
    """Raise CommandError where a request had no right answer, and was not refused for lack of room either."""
    found = [
        f"{run.name}: {count} {status}"
        for run in runs
        for status, count in run.failures.items()
        if status != Status.RESOURCE_EXHAUSTED.value
    ]
    if found:
        raise CommandError(f"requests failed: {'; '.join(found)}")


def report(text: str) -> None:
    typer.echo(text, err=True)


def run(measurement: Coroutine[object, object, Result]) -> Result:
    """Run a measurement of a live cluster; CommandError for a gRPC error of its router."""
    import grpc

    try:
        return asyncio.run(measurement)
    except (grpc.aio.AioRpcError, ExceptionGroup) as error:
        cause = only_cause(error)
        if not isinstance(cause, grpc.aio.AioRpcError):
            raise
        raise CommandError(f"the router: {cause.code().name}: {cause.details()}") from error


def only_cause(error: BaseException) -> BaseException:
    """Return the one error within groups of one: a command's error comes in a group while others of its tasks run."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
