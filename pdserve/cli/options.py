"""Flags that several commands share, each spelled and explained once; those that go together are a dataclass."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, get_args
from urllib.parse import urlsplit

import typer

from pdserve.base.errors import ConfigError, echo
from pdserve.router.config import PolicyName
from pdserve.settings.config import KvCacheDtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.launch.plan import ClusterSpec, Flags
    from pdserve.measure.client import Access, Door
    from pdserve.measure.known_answers import KnownRequest
    from pdserve.measure.outcomes import Objective
    from pdserve.measure.overload import Trial
    from pdserve.measure.workload import Workload
    from pdserve.net.operator_client import AdminClient
    from pdserve.proto.v1 import inference_pb2 as inference

DEFAULT_MODEL = "smollm2-135m-instruct"
API_KEY = "PDSERVE_API_KEY"  # variable with the key that is shown to routers
WORKLOAD_HELP = (
    "Lengths NxINxOUT: requests, prompt tokens, answer tokens; random lengths INxOUT or INxOUT~S: means, and the "
    "deviation of their logarithms; a trace (.csv of Azure, .jsonl of Mooncake, .json list of {start_time, prompt_len, "
    "output_len}), or a slice that comes with pdserve: azure-conv, azure-code, mooncake."
)
WorkloadText = Annotated[str, typer.Option("--workload", metavar="W", help=WORKLOAD_HELP)]
_MOST_SECONDS = 86_400
_UINT32 = 2**32 - 1


class _Choice(TypedDict):
    metavar: str
    parser: Callable[[str], str]


def one_of(*names: str) -> _Choice:
    """Return what makes an option take these names alone, also where it is repeatable."""

    def check(given: str) -> str:
        if given not in names:
            raise typer.BadParameter(f"{given!r} is none of {', '.join(names)}")
        return given

    return {"metavar": "|".join(names), "parser": check}


DOORS = one_of("grpc", "http")
APIS = one_of("grpc", "completions", "chat", "responses", "messages")
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with settings by name; flags override it.")
]
ClusterName = Annotated[str, typer.Option("--name", envvar="PDSERVE_CLUSTER", help="Which of this machine's clusters.")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint", help="host:port of a router; by default the cluster that runs here.")
]
HttpServer = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="URL", help="Where OpenAI's API is served; by default by the cluster that runs here."
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        envvar="PDSERVE_CA_FILE",
        help="Certificates that a router's must lead to, where its endpoint is TLS. The key that is shown there is "
        "taken from the variable PDSERVE_API_KEY.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(help="A path, or a name from the catalog or the Hugging Face hub.")]
Threads = Annotated[int | None, typer.Option("--num-threads", min=1, help="CPU threads of each worker's engine.")]
Dtype = Annotated[str, typer.Option(help="Type of weights and KV.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(metavar="ttft:MS tpot:MS", help="Objectives that goodput counts; either may be missing."),
]
Placements = Annotated[
    list[str] | None,
    typer.Option(**one_of(*get_args(PolicyName)), help="How requests are placed; repeatable."),
]
ProfileFile = Annotated[Path | None, typer.Option(help="Step costs; by default OPT-13B on A100.")]


@dataclass(frozen=True, slots=True)
class RouterFlags:
    """A router as its clients reach it."""

    endpoint: Endpoint = None
    ca_file: CaFile = None
    name: ClusterName = "default"

    def router(self) -> "tuple[str, Access | None]":
        """Return the address of its gRPC port, and a client's credentials."""
        from pdserve.launch.folder import read_state

        api_key = os.environ.get(API_KEY, "")
        if self.endpoint is not None:
            return self.endpoint, self._access(None, api_key)
        state = read_state(self.name)
        return state.endpoint, self._access(state.ca_file, api_key)

    def model(self, given: str) -> str:
        """Return the name of the model to ask: the one given, or that of this machine's cluster."""
        from pdserve.launch.folder import read_state

        return given or ("" if self.endpoint is not None else read_state(self.name).model)

    def http(self, url: str | None) -> "tuple[str, Access | None]":
        """Return the URL of its HTTP port, `url` where that is given, and a client's credentials."""
        from pdserve.launch.folder import read_state

        if url is not None:
            return url, self._access(None, key_for(url))
        if self.endpoint is not None:
            raise ConfigError("--server is needed beside --endpoint")
        state = read_state(self.name)
        if not state.http:
            raise ConfigError(f"--door: cluster {self.name} does not serve http")
        return state.http, self._access(state.ca_file, key_for(state.http))

    def doors(self, names: "Sequence[str]", server: str | None) -> "dict[Door, tuple[str, Access | None]]":
        """Return the address of each door, and a client's credentials."""
        from pdserve.measure.client import Door

        return {Door(name): self.http(server) if name == "http" else self.router() for name in names}

    def _access(self, ca_file: Path | None, api_key: str) -> "Access | None":
        from pdserve.measure.client import Access

        trusted = self.ca_file or ca_file
        if api_key and trusted is None:
            raise ConfigError(f"{API_KEY}: a key is sent over TLS alone: --ca-file is needed")
        return None if trusted is None else Access(trusted, api_key)


@dataclass(frozen=True, slots=True)
class OperatorFlags:
    """A cluster as its operator reaches it: of this machine, or where a router's internal port is."""

    name: ClusterName = "default"
    admin: Annotated[str | None, typer.Option(help="host:port of a router's internal port.")] = None
    secret_file: Annotated[Path | None, typer.Option(help="The cluster's shared secret.")] = None
    identity_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with an operator's tls.crt, tls.key and ca.crt, where the cluster asks for certificates."
        ),
    ] = None

    def client(self) -> "AdminClient":
        """Return a connection to a router's internal port, dialled as it is used.

        ConfigError where address or secret is given alone, or no such cluster runs.
        """
        from pdserve.launch.folder import read_state
        from pdserve.net.operator_client import AdminClient

        if self.admin is not None and self.secret_file is not None:
            return AdminClient(self.admin, self.secret_file, self.identity_dir)
        if self.admin is not None or self.secret_file is not None:
            raise ConfigError("--admin and --secret-file must be given together")
        return read_state(self.name).operator(self.identity_dir)


THIS_MACHINES = OperatorFlags()
THIS_MACHINES_ROUTER = RouterFlags()


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are chosen; what is not given is left to the router's defaults."""

    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token. (default: 1)")] = None
    top_k: Annotated[int | None, typer.Option(min=0, max=_UINT32, help="Sample from so many likeliest tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Sample from this much probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Sample from tokens this likely, next to the likeliest.")] = None
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Makes the answer repeatable.")] = None
    max_tokens: Annotated[int, typer.Option(min=0, max=_UINT32, help="Tokens to generate at most.")] = 128
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.")] = None

    def request(self, *, n: int | None = None, ignore_eos: bool = False) -> "inference.GenerateRequest":
        from pdserve.proto.v1 import inference_pb2 as inference

        chosen = asdict(self)
        stop = [utf8("--stop", text) for text in chosen.pop("stop") or ()]
        params = inference.SamplingParams(**chosen, n=n, ignore_eos=ignore_eos)
        return inference.GenerateRequest(sampling=params, stop=stop)


@dataclass(frozen=True, slots=True)
class WorkloadFlags:
    num_prompts: Annotated[
        int,
        typer.Option(
            min=2,
            help="So many requests of random lengths, or the first so many of a trace. At each rate, `sim` and `plan` "
            "simulate no more.",
        ),
    ] = 1000
    scale: Annotated[float, typer.Option(min=1e-3, help="Factor for all lengths.")] = 1.0
    output_scale: Annotated[
        float | None, typer.Option(min=1e-3, help="Factor for the lengths of answers; by default that of --scale.")
    ] = None
    max_length: Annotated[int, typer.Option(min=2, help="Prompts and answers are cut to this many tokens.")] = 1_000_000
    seed: Annotated[int, typer.Option(help="Seed of random lengths, prompts and arrivals.")] = 0

    def read(self, text: str) -> "Workload":
        from pdserve.measure.read_workload import parse_workload

        workload = parse_workload(text, self.num_prompts, self.seed)
        workload = workload.first(self.num_prompts) if workload.is_timed else workload
        return workload.scaled(self.scale, self.max_length, self.output_scale)


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

    def spec(self, name: str, router_flags: "Flags | None" = None, **worker_flags: object) -> "ClusterSpec":
        from pdserve.cli.models import cluster_of

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

    def requests(self, own: OwnClusterFlags, model: str, *, are_answers_equal: bool = False) -> "list[KnownRequest]":
        from pdserve.measure.known_answers import Lengths, known_requests

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
    seconds: Annotated[float, typer.Option(min=1, max=_MOST_SECONDS, help="Seconds of load at each rate.")] = 60
    calibration: Annotated[
        float, typer.Option(min=2, max=_MOST_SECONDS, help="Seconds of load before, to find the capacity.")
    ] = 60

    def trial(self, sizes: WorkloadFlags, loads: tuple[float, ...], goal: "Objective | None") -> "Trial":
        from pdserve.measure.overload import Trial

        return Trial(
            sizes.read(self.workload), tuple(self.load or loads), self.seconds, self.calibration, goal, sizes.seed
        )


def key_for(url: str) -> str:
    """Return the key that a router is shown; ConfigError where it would leave this machine in clear."""
    from pdserve.net.rpc import is_loopback

    key = os.environ.get(API_KEY, "")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}") from error
    if key and parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigError(f"{API_KEY}: a key is sent over TLS alone: {url} is not https")
    return key


def utf8(flag: str, text: str) -> str:
    """Return a text that is given; ConfigError where its bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{flag}: {echo(text, ascii)} is not UTF-8") from error
    return text


def checked_rate(rate: float) -> float:
    """Return a request rate; ConfigError unless it is over 0 and finite."""
    if not (rate > 0 and isfinite(rate)):
        raise ConfigError(f"--request-rate: {rate:g} must be over 0 and finite")
    return rate
