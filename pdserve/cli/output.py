"""Where results go: tables on standard output, JSON and plots in files, which are tried before the work begins."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError

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
        show_default=False,
        callback=writable("--json"),
    ),
]


def _plottable(path: Path | None) -> Path | None:
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot: needs matplotlib: pip install 'pdserve[plots]'")
    return writable("--plot")(path)


PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw a PNG there.", show_default=False, callback=_plottable)
]


def show(json_file: Path | None, text: str, *shown: object) -> None:
    """Print what is shown and write the text to the file; for standard output, print the text alone."""
    from pdserve.bench.tables import output

    if json_file == STANDARD_OUTPUT:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    console = output()
    for each in shown:
        console.print(each)
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
