"""The command line as a whole: which commands there are, and how errors end them.

Exit status: 0 done, 1 failed, 2 refused what the operator asked for.
"""

import logging
import sys
from typing import Annotated

import typer

from pdserve import __version__
from pdserve.cli import (
    ask,
    cancel,
    capacity,
    chaos,
    cluster,
    experiments,
    handoff,
    load,
    models,
    processes,
    routers,
    speed,
)
from pdserve.cli.default_command import DefaultLoad
from pdserve.cli.failure import in_words, only_cause
from pdserve.errors import CommandError, ConfigError

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="pdserve",
    help="Serve large language models with prefill and decode on separate worker pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(help="Configuration of the processes.", no_args_is_help=True)
models_app = typer.Typer(help="Models known by name.", no_args_is_help=True)
bench_app = typer.Typer(cls=DefaultLoad, help="Measure a cluster, or a part of one. Without a command: load.")

app.command("up")(cluster.up)
app.command("status")(cluster.status)
app.command("demo")(cluster.demo)
app.command("generate")(ask.generate)
app.command("chat")(ask.chat)
app.command("profile")(experiments.profile)
app.command("sim")(capacity.sim)
app.command("plan")(capacity.plan)
app.command("router")(processes.router)
app.command("prefill-worker")(processes.prefill_worker)
app.command("decode-worker")(processes.decode_worker)
config_app.command("schema")(processes.schema)
models_app.command("list")(models.list_models)
models_app.command("fetch")(models.fetch_model)
bench_app.command("load")(load.bench)
bench_app.command("router")(speed.bench_router)
bench_app.command("accuracy")(experiments.accuracy)
bench_app.command("overload")(experiments.overload)
bench_app.command("simulator")(experiments.simulator)
bench_app.command("routers")(routers.bench_routers)
bench_app.command("chaos")(chaos.bench_chaos)
bench_app.command("cancel")(cancel.bench_cancel)
bench_app.command("handoff")(handoff.bench_handoff)
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(models_app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdserve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate worker pools."""


def main() -> None:
    """Run the command that the arguments name; errors become one line and an exit status."""
    try:
        app()
    except (ConfigError, CommandError, OSError, ExceptionGroup) as error:
        cause = only_cause(error)
        if not isinstance(cause, ConfigError | CommandError | OSError):
            raise
        logger.debug("the command fails", exc_info=error)
        _fail(in_words(cause), 2 if isinstance(cause, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, status: int) -> None:
    typer.echo(f"pdserve: {' '.join(message.split())}", err=True)
    sys.exit(status)
