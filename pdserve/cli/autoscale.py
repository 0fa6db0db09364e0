"""Commands about the policy of the autoscaler. They need no cluster."""

from pathlib import Path
from typing import Annotated

import typer

PolicyFile = Annotated[Path, typer.Argument(metavar="POLICY", help="The policy, YAML or JSON.", show_default=False)]


def validate(
    policies: Annotated[list[Path], typer.Argument(metavar="POLICY...", help="Policies, YAML or JSON.")],
) -> None:
    """Check policies: what is wrong is named with file, line, field and limit."""
    from pdserve.autoscaler.loading import load
    from pdserve.measure.warm_up import warm_up

    for path in policies:
        warm_up(load(path))  # so that its trace is read too
        typer.echo(f"{path}: valid")


def explain(policy: PolicyFile) -> None:
    """Say in plain sentences what a policy does, and when."""
    from pdserve.autoscaler.explain import sentences
    from pdserve.autoscaler.loading import load

    for sentence in sentences(load(policy)):
        typer.echo(sentence)


def schema() -> None:
    """Print the JSON Schema of policies, for editors."""
    from pdserve.autoscaler.schema import json_schema

    typer.echo(json_schema(), nl=False)
