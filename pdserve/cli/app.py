"""The command line as a whole: which commands there are, and how errors end them.

Exit status: 0 done, 1 failed, 2 refused what the operator asked for.
"""

import logging
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdserve import __version__
from pdserve.base.errors import EXTRAS, CommandError, ConfigError, not_installed
from pdserve.cli import (
    ask,
    autoscale,
    bench,
    checking,
    cluster,
    doctor,
    models,
    operating,
    planning,
    processes,
)
from pdserve.cli.results import only_cause

logger = logging.getLogger(__name__)

_OBJECTIVE = re.compile(r"\w+:[\w.+-]+")


class DefaultLoad(TyperGroup):
    """Runs `load` where the first argument is no command: `bench --workload W` is `bench load --workload W`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's, of a version typer chooses
        known = {*self.commands, *self.get_help_option_names(ctx)}
        return super().parse_args(ctx, args if args and args[0] in known else ["load", *args])


app = typer.Typer(
    name="pdserve",
    help="Serve large language models with prefill and decode on separate worker pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
keys_app = typer.Typer(help="API keys of clients.", no_args_is_help=True)
config_app = typer.Typer(help="Configuration of the processes.", no_args_is_help=True)
models_app = typer.Typer(help="Models known by name.", no_args_is_help=True)
autoscale_app = typer.Typer(help="Keep each pool at the size that a policy asks for.", no_args_is_help=True)
bench_app = typer.Typer(cls=DefaultLoad, help="Measure a cluster, or a part of one. Without a command: load.")

app.command("up")(cluster.up)
app.command("down")(cluster.down)
app.command("logs")(cluster.logs)
app.command("status")(cluster.status)
app.command("doctor")(doctor.doctor)
app.command("role")(operating.role)
app.command("drain")(operating.drain)
app.command("undrain")(operating.undrain)
app.command("certs")(operating.certs)
app.command("demo")(cluster.demo)
app.command("generate")(ask.generate)
app.command("chat")(ask.chat)
app.command("run-batch")(ask.run_batch)
app.command("profile")(planning.profile)
app.command("sim")(planning.sim)
app.command("plan")(planning.plan)
app.command("router")(processes.router)
app.command("frontend")(processes.frontend)
app.command("worker")(processes.worker)
app.command("worker-node")(processes.worker_node)
app.command("watch-pods")(processes.watch_pods)
keys_app.command("new")(operating.new_key)
config_app.command("schema")(processes.schema)
autoscale_app.command("validate")(autoscale.validate)
autoscale_app.command("explain")(autoscale.explain)
autoscale_app.command("schema")(autoscale.schema)
autoscale_app.command("crd")(autoscale.crd)
autoscale_app.command("simulate")(autoscale.simulate)
autoscale_app.command("run")(autoscale.run)
autoscale_app.command("status")(autoscale.status)
autoscale_app.command("end", hidden=True)(autoscale.end)
models_app.command("list")(models.list_models)
models_app.command("fetch")(models.fetch_model)
models_app.command("check")(checking.check_model)
bench_app.command("load")(bench.load)
bench_app.command("agents")(bench.agents)
bench_app.command("frontend")(bench.frontend)
bench_app.command("chaos")(bench.chaos)
bench_app.command("accuracy")(bench.accuracy)
bench_app.command("overload")(bench.overload)
app.add_typer(autoscale_app, name="autoscale")
app.add_typer(bench_app, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(keys_app, name="keys")
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


def main(commands: typer.Typer = app) -> None:
    """Run the command that the arguments name; errors become one line and an exit status."""
    for stream in (sys.stdin, sys.stdout):  # a terminal may lack characters, and input may not be text
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        commands(repeat_goodput(sys.argv[1:]))
    except (ConfigError, CommandError, OSError, ModuleNotFoundError, ExceptionGroup) as error:
        cause = only_cause(error)
        if isinstance(cause, ModuleNotFoundError) and cause.name in EXTRAS:
            cause = not_installed(cause.name)
        if not isinstance(cause, ConfigError | CommandError | OSError):
            raise
        logger.debug("the command fails", exc_info=error)
        _fail(_in_words(cause), 2 if isinstance(cause, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, status: int) -> None:
    typer.echo(f"pdserve: {' '.join(message.split())}", err=True)
    sys.exit(status)


def repeat_goodput(arguments: Sequence[str]) -> list[str]:
    """Write `--goodput` before each objective: vLLM's command line takes several after one, ttft:250 tpot:40."""
    result: list[str] = []
    for argument in arguments:
        if len(result) > 1 and result[-2] == "--goodput" and _OBJECTIVE.fullmatch(argument):
            result.append("--goodput")
        result.append(argument)
    return result


def _in_words(error: BaseException) -> str:
    """Return what went wrong: of an operating system's error the file and why, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
