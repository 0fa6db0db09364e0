"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with settings by name; flags override it.")
]
ClusterName = Annotated[str, typer.Option("--name", envvar="PDSERVE_CLUSTER", help="Which of this machine's clusters.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", help="host:port of a router; by default the cluster that runs here.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Sampling: what is not given is left to the router's defaults.
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token. (default: 1)", show_default=False)
]
TopK = Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens.", show_default=False)]
TopP = Annotated[float | None, typer.Option(help="Draw from this much probability.", show_default=False)]
MinP = Annotated[
    float | None, typer.Option(help="Draw from tokens this likely, next to the likeliest.", show_default=False)
]
Seed = Annotated[int | None, typer.Option(help="Makes the draw repeatable.", show_default=False)]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.", show_default=False)
]
