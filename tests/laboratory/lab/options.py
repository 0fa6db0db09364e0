"""Flags that several measurements share; those that go together are a dataclass."""

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import typer

from lab.frontend import Load
from lab.known_answers import KnownRequest, Lengths, known_requests
from lab.overload import Trial
from lab.streams import Api
from pdserve.cli.models import cluster_of
from pdserve.cli.options import DEFAULT_MODEL, WorkloadFlags, WorkloadText, one_of
from pdserve.launch.plan import ClusterSpec, Flags
from pdserve.measure.outcomes import Objective
from pdserve.settings.config import KvCacheDtype

APIS = one_of("grpc", "completions", "chat", "responses", "messages")
Model = Annotated[str, typer.Argument(help="A path, or a name from the catalog or the Hugging Face hub.")]
Threads = Annotated[int | None, typer.Option("--num-threads", min=1, help="CPU threads of each worker's engine.")]
Dtype = Annotated[str, typer.Option(help="Type of weights and KV.")]
MOST_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class OwnClusterFlags:
    """A cluster that a measurement starts for itself."""

    model: Model = DEFAULT_MODEL
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 1
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1
    num_threads: Threads = None
    dtype: Dtype = "float32"
    kv_cache_dtype: Annotated[KvCacheDtype, typer.Option(help="The workers' --kv-cache-dtype.")] = "auto"
    speculative_config: Annotated[str | None, typer.Option(help="The workers' --speculative-config.")] = None

    def spec(self, name: str, router_flags: Flags | None = None, **worker_flags: object) -> ClusterSpec:
        return replace(
            cluster_of(self.model, f"{name}-{os.getpid()}"),
            num_prefill=self.prefill,
            num_decode=self.decode,
            worker_flags={
                "num_threads": self.num_threads,
                "dtype": self.dtype,
                "kv_cache_dtype": self.kv_cache_dtype,
                "speculative_config": self.speculative_config,
                **worker_flags,
            },
            router_flags=router_flags or {},
        )


@dataclass(frozen=True, slots=True)
class KnownRequestFlags:
    """Requests whose answers one engine computes before."""

    distinct: Annotated[int, typer.Option(min=1, help="Different requests; they are sent in turn.")] = 100
    input_len: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 256
    output_len: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 128
    seed: Annotated[int, typer.Option(help="Seed of the requests, their times and the faults.")] = 0

    def requests(self, own: OwnClusterFlags, model: str, *, are_answers_equal: bool = False) -> list[KnownRequest]:
        lengths = Lengths(self.input_len, self.output_len, are_answers_equal)
        code = None if own.kv_cache_dtype == "auto" else own.kv_cache_dtype
        return known_requests(model, own.dtype, self.distinct, lengths, self.seed, code)


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """Loads of a cluster, as shares of its capacity."""

    workload: WorkloadText = "1155x211"  # means of azure-conv
    load: Annotated[list[float] | None, typer.Option(min=0.01, max=100, help="Share of the capacity; repeatable.")] = (
        None
    )
    seconds: Annotated[float, typer.Option(min=1, max=MOST_SECONDS, help="Seconds of load at each rate.")] = 60
    calibration: Annotated[
        float, typer.Option(min=2, max=MOST_SECONDS, help="Seconds of load before, to find the capacity.")
    ] = 60

    def trial(self, sizes: WorkloadFlags, loads: tuple[float, ...], goal: Objective | None) -> Trial:
        return Trial(
            sizes.read(self.workload), tuple(self.load or loads), self.seconds, self.calibration, goal, sizes.seed
        )


@dataclass(frozen=True, slots=True)
class FrontendFlags:
    """Loads of a router's processes: all combinations of what is given."""

    door: Annotated[list[str] | None, typer.Option(**APIS, help="Repeatable; by default all.")] = None
    step_ms: Annotated[list[float] | None, typer.Option(help="Milliseconds of a decode step; repeatable.")] = None
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; repeatable.")] = None
    output_len: Annotated[list[int] | None, typer.Option(help="Tokens of an answer; repeatable.")] = None
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each stream, after one that is not counted.")] = 4
    num_frontends: Annotated[
        list[int] | None, typer.Option(help="Frontends in processes of their own; 0, the default: none. Repeatable.")
    ] = None

    def loads(self) -> list[Load]:
        doors, counts = map(Api, self.door or Api), self.num_frontends or (0,)
        kinds = product(
            self.step_ms or (20.0, 2.0), doors, self.streams or (64, 256), self.output_len or (64, 8), counts
        )
        return [Load(door, ms / 1e3, num, tokens, self.rounds, count) for ms, door, num, tokens, count in kinds]
