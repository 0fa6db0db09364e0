"""The command that says of a model whether it is served, what it needs, and what fits."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.base.errors import ConfigError
from pdserve.cli.flags import config_flags
from pdserve.cli.models import fetched
from pdserve.cli.options import AsJson
from pdserve.settings.config import WorkerConfig

if TYPE_CHECKING:
    from pdserve.executor.footprint import Footprint


# Settings of a worker that change what a model needs.
FORM = ("device", "dtype", "kv_cache_dtype", "quantization", "page_size", "speculative_config")
PLACE = ("tensor_parallel_size", "pipeline_parallel_size", "nnodes", "rank_memory")


@config_flags(WorkerConfig, without=set(WorkerConfig.model_fields).difference(FORM, PLACE))
def check_model(
    model: Annotated[str, typer.Argument(help="A model, by path or name.")], as_json: AsJson = False, **flags: object
) -> None:
    """Say whether a model is served, what it needs, and what fits on this machine. Starts nothing.

    Reads its config, tokenizer, chat templates and the headers of its weights. Exit status 1 if it is not served.
    """
    from pdserve.executor.footprint import footprint_of

    try:
        fit = footprint_of(fetched(model), **flags)
    except ConfigError as error:
        typer.echo(json.dumps({"model": model, "refused": str(error)}, indent=2) if as_json else f"not served: {error}")
        raise typer.Exit(1) from None
    if as_json:
        fitting = {"num_pages": fit.num_pages, "num_tokens": fit.num_tokens, "num_sequences": fit.num_sequences}
        typer.echo(json.dumps({**asdict(fit), **fitting}, indent=2))
        return
    for name, text in _described(fit):
        typer.echo(f"{name:14}{text}")


def _described(fit: "Footprint") -> Iterator[tuple[str, str]]:
    """Yield what is shown of a model, line by line."""
    form = fit.dtype if fit.quantization == "none" else f"{fit.quantization}, inputs {fit.dtype}"
    yield "model", f"{fit.name} ({fit.path})"
    yield "family", f"{fit.architecture}: served"
    yield "parameters", f"{fit.num_parameters:,}"
    yield "weights", f"{_size(fit.file_bytes)} in files, about {_size(fit.weight_bytes)} in memory"
    for name, size in (("ranks", fit.degrees.tensor), ("stages", fit.degrees.pipeline)):
        if size > 1:
            yield name, f"{size}: at most {_size(fit.rank_weight_bytes)} of the weights in each"
    if (nodes := fit.degrees.nodes) > 1:
        held = _size(fit.degrees.ranks_per_node * fit.rank_weight_bytes)
        yield "machines", f"{nodes}: at most {held} of the weights on each, and its share of each page"
        yield "", "each needs the model's files, and its own handoff_host and identity_dir"
    yield "form", f"{form} ({fit.because})"
    yield "context", f"{fit.max_model_len:,} tokens"
    yield "KV", f"{len(fit.windows)} layers of {fit.num_kv_heads} heads of {fit.head_dim}; a query sees {_seen(fit)}"
    sizes = " or ".join(map(str, fit.page_sizes))
    yield "KV bytes", f"{fit.kv_dtype}: {fit.token_bytes:,} a token, {fit.page_bytes:,} a page of {sizes} tokens"
    if fit.state_bytes:
        yield "state", f"{fit.state_bytes:,} bytes a sequence, in one page whatever its length"
    yield "", f"{_size(fit.sequence_bytes)} a sequence of full length{_spared(fit)}"
    if fit.draft_weight_bytes:
        kv = f" and {fit.draft_page_bytes:,} bytes a page" if fit.draft_page_bytes else ""
        yield "guesses", f"{fit.draft_method}: about {_size(fit.draft_weight_bytes)} of weights in memory{kv}"
    room = f"KV of {fit.num_tokens:,} tokens, {fit.num_sequences:,} sequences of full length"
    ranks = f" on each of {fit.num_alike} like it" if fit.num_alike > 1 else ""
    here = f"{_size(fit.free_bytes)} free: beside the weights{ranks} {room}" if fit.free_bytes else "there is none here"
    yield f"this {fit.device}", here
    yield "chat", "by its template" if fit.has_chat_template else "not served: the model has no chat template"


def _seen(fit: "Footprint") -> str:
    """Return how many tokens a query sees, in how many layers."""
    kinds = Counter(fit.windows)
    seen = {window: "all tokens" if window is None else f"the last {window:,} tokens" for window in kinds}
    return ", ".join(text if len(kinds) == 1 else f"{text} in {kinds[window]}" for window, text in seen.items())


def _spared(fit: "Footprint") -> str:
    """Return what windows spare of that, if pages leave any."""
    whole = sum(-(-fit.max_model_len // size) for size in fit.page_sizes) * fit.page_bytes
    return f", {_size(whole)} without windows" if fit.sequence_bytes < whole else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
