"""Runs measurements and puts results where they go: tables on standard output, JSON and plots in files.

Whether a file can be written is tried before the work begins.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pdserve.errors import CommandError, ConfigError, Status

if TYPE_CHECKING:
    from pdserve.measure.summary import Summary

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


def _plottable(path: Path | None) -> Path | None:
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot: needs matplotlib: pip install 'pdserve[plots]'")
    return writable("--plot")(path)


PlotFile = Annotated[Path | None, typer.Option("--plot", help="Also draw a PNG there.", callback=_plottable)]


def show(json_file: Path | None, results: object, *shown: object) -> None:
    """Print what is shown and write the results to the file as JSON; for standard output, print that alone."""
    from pdserve.measure.tables import as_json, output

    text = as_json(results)
    if json_file == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    console = output()
    for each in shown:
        console.print(each)
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")


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
