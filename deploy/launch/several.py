"""Several models on one machine: a cluster for each, and frontends that serve the clients of all.

The frontends are the first cluster's. The other clusters have everything but an address for clients: a router, workers,
an autoscaler, a folder and a name of their own. Once all are ready, what ends in one of them leaves the others running.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.open import check_model
from pdserve.launch.folder import free_port
from pdserve.launch.local import Listener, LocalCluster, running
from pdserve.launch.plan import WORKER_ROLES, ClusterSpec, Flags, ServedAt
from pdserve.net.rpc import join_address

_REPLACED_BY_MODELS = ("model", "served_model_name", "routers")  # flags of a frontend


def joined(specs: Sequence[ClusterSpec], per_model: Collection[str]) -> tuple[ClusterSpec, ...]:
    """Return the clusters of several models, the first of them with frontends for all; a single one as it is.

    `per_model`: settings of frontends that each model has of its own. ConfigError where two models have the same name,
    or what they ask for is for one model alone.
    """
    if len(specs) == 1:
        return tuple(specs)
    first, *rest = specs
    names = {first.served_model_name: first.name}
    for spec in rest:
        name = f"{first.name}-{re.sub('[^A-Za-z0-9._-]', '-', spec.served_model_name)}"
        if spec.served_model_name in names:
            raise ConfigError(f"models: {spec.served_model_name!r} is the name of two; set served_model_name")
        if name in names.values():
            text = f"{spec.served_model_name!r} would have the folder of another one, {name}; set served_model_name"
            raise ConfigError(f"models: {text}")
        names[spec.served_model_name] = name
    for spec in specs:
        _check_alone(spec)
    given = [replace(each, internal_port=each.internal_port or free_port(each.internal_host)) for each in specs]
    total, others = sum(spec.most_workers for spec in specs), tuple(names.values())[1:]
    shared = {key: value for key, value in first.frontend_flags.items() if key not in per_model}
    models = [json.dumps(_shown_to_frontends(spec, per_model)) for spec in given]
    of_frontends = {
        **shared,
        **dict.fromkeys(_REPLACED_BY_MODELS),
        "models": models,
        "drain_timeout_s": longest_drain_s(specs),
    }
    given = [replace(spec, num_beside=total - spec.most_workers) for spec in given]
    lead = replace(given[0], num_frontends=max(1, first.num_frontends), frontend_flags=of_frontends, others=others)
    return (lead, *(replace(spec, name=names[spec.served_model_name], num_frontends=0) for spec in given[1:]))


def longest_drain_s(specs: Sequence[ClusterSpec]) -> float:
    """Return how long frontends of all these clusters let requests finish."""
    return max(spec.drain_timeout_s for spec in specs)


def _shown_to_frontends(spec: ClusterSpec, per_model: Collection[str]) -> Flags:
    return {
        **{key: value for key, value in spec.frontend_flags.items() if key in per_model},
        "model": spec.model,
        "served_model_name": spec.served_model_name,
        "routers": [join_address(spec.internal_host, spec.internal_port or 0)],
    }


def _check_alone(spec: ClusterSpec) -> None:
    if spec.elsewhere:
        raise ConfigError("models: workers on Ray go with one model so far")
    if any(spec.flags_of(role).get("device") == "cuda" for role in WORKER_ROLES):
        raise ConfigError("models: device cuda goes with one model so far: GPUs are dealt out for each model alone")


@asynccontextmanager
async def running_all(
    specs: Sequence[ClusterSpec], listener: Callable[[str], Listener]
) -> AsyncIterator[tuple[LocalCluster, ...]]:
    """Run clusters as `joined` returns them for the length of the block; at its end let all drain, frontends first.

    `listener`: of a cluster, by its name. Raises as `running` does.
    """
    first, *rest = specs
    for spec in rest:
        await asyncio.to_thread(check_model, Path(spec.model), with_weights=spec.reads_weights)
    async with running(first, listener(first.name)) as lead, AsyncExitStack() as stack:
        certificates = None if lead.state.ca_file is None else lead.state.ca_file.parent
        served_at = ServedAt(lead.state.endpoint, lead.state.http, certificates, first.name)
        clusters = [lead]
        for spec in rest:
            behind = replace(spec, served_at=served_at, workers_secret_file=lead.state.secret_file)
            clusters.append(await stack.enter_async_context(running(behind, listener(spec.name))))
        yield tuple(clusters)
        if rest:
            await lead.stop_frontends(longest_drain_s(specs))
