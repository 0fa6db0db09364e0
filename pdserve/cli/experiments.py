"""`pdserve bench accuracy`, `overload` and `simulator`: experiments on clusters that they start themselves."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdserve.launch.plan import ClusterSpec

Model = Annotated[str, typer.Argument(help="A path, or a name from the catalog.")]
WorkloadText = Annotated[
    str, typer.Option("--workload", metavar="W", help="A trace (.csv, .jsonl, .json), or mean random lengths INxOUT.")
]
Scale = Annotated[float, typer.Option(min=1e-3, help="Factor for all lengths.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Longer prompts and answers are cut.")]
Prefill = Annotated[int, typer.Option(min=1, help="Prefill workers.")]
Decode = Annotated[int, typer.Option(min=1, help="Decode workers.")]
Seconds = Annotated[float, typer.Option(min=1, help="Of load at each rate.")]
Seed = Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the results there.", show_default=False)]

DEFAULT_MODEL = "smollm2-135m-instruct"
AZURE_MEANS = "1155x211"  # of Azure's conversation trace of 2023


def accuracy(
    model: Model = DEFAULT_MODEL,
    workload: WorkloadText = AZURE_MEANS,
    scale: Scale = 0.125,
    max_tokens: MaxTokens = 1024,
    prefill: Prefill = 1,
    decode: Decode = 1,
    load: Annotated[list[float] | None, typer.Option(help="Share of the capacity; repeatable.")] = None,
    seconds: Seconds = 60,
    calibration: Annotated[float, typer.Option(min=1, help="Seconds of load before.")] = 60,
    profile: Annotated[
        Path | None, typer.Option(help="To start from; by default OPT-13B on A100, wrong here.", show_default=False)
    ] = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with seen times to first token and per token, starting from a wrong profile."""
    from pdserve.experiments.lengths import read_lengths
    from pdserve.experiments.live import live_cluster
    from pdserve.experiments.prediction import Trial, predict
    from pdserve.experiments.report import prediction_json, prediction_table
    from pdserve.perfmodel.profile import shipped_profile

    lengths = read_lengths(workload, scale, max_tokens, seed)
    trial = Trial(lengths, tuple(load or (0.3, 0.6, 0.9)), calibration, seconds, seed)
    spec = _spec(model, (prefill, decode), {"policy": "goodput", "profile": profile or shipped_profile()})

    async def measure() -> None:
        async with live_cluster(spec, _tell) as cluster:
            found = await predict(cluster, trial, _tell)
        _show(prediction_table(found, lengths.name))
        if json_file is not None:
            json_file.write_text(prediction_json(found, lengths.name), encoding="utf-8")

    asyncio.run(measure())


def _spec(model: str, workers: tuple[int, int], router_flags: dict[str, object]) -> "ClusterSpec":
    from pdserve.cli.models import fetched
    from pdserve.launch.plan import ClusterSpec

    path = fetched(model)
    return ClusterSpec(
        model=str(path),
        served_model_name=path.stem if Path(model).exists() else model,
        num_prefill=workers[0],
        num_decode=workers[1],
        name="experiment",
        router_flags=router_flags,
    )


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _show(table: object) -> None:
    from rich.console import Console

    Console().print(table)
