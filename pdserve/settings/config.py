"""Configuration of a process: one YAML file, read once, overridden by flags of the same names.

A default is written in one place, its field.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from pdserve.base.roles import Role
from pdserve.base.yaml_models import FieldError, read_model
from pdserve.protocol.kvlayout import KvCode
from pdserve.protocol.prefix_hash import BLOCK_TOKENS
from pdserve.settings.degrees import Degrees, nodes_problem
from pdserve.settings.process import ProcessConfig
from pdserve.settings.rank_memory import RankMemory, is_own_unasked, rank_memory_problem
from pdserve.settings.speculative import SpeculativeSetting

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KvCacheDtype = Literal["auto", KvCode]
Quantization = Literal["auto", "none", "int8", "int4", "awq", "compressed-tensors", "fp8", "gguf", "gptq", "mxfp4"]
QuantizedInputs = Literal[8, 16]
AttentionBackend = Literal["auto", "triton", "flashinfer"]
Device = Literal["auto", "cpu", "cuda", "interpreter"]

PAGE_SIZE = 16
MAX_RANKS = 64
GPU_PAGE_SIZE = 64  # the kernels' tiles were chosen for this: all keys of a tile are in one page
STEP_TOKENS = {Role.PREFILL: 2048, Role.DECODE: 512, Role.MIXED: 512}  # tokens in a step, by the worker's role

_Config = TypeVar("_Config", bound="ProcessConfig")


def _without_password(given: object) -> object:
    if isinstance(given, str) and "@" in given:  # every user of the machine can read a command line
        raise FieldError((), "a URL with a user or password is refused: OTEL_EXPORTER_OTLP_HEADERS has secrets")
    return given


TracesEndpoint = Annotated[str, Field(pattern=r"^https?://[^/@\s]+/?$"), BeforeValidator(_without_password)]


class ServingConfig(ProcessConfig):
    """Settings of routers and workers."""

    model: str = Field(
        description="A Hugging Face directory, a GGUF file, a name from the catalog, or of the Hugging Face hub."
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="Name of the model in requests; by default the model's own."
    )
    secret_file: Path = Field(description="The cluster's shared secret; its owner and group alone may read it.")
    otlp_traces_endpoint: TracesEndpoint | None = Field(
        None,
        description="Where spans of requests are sent with OTLP over gRPC, such as http://collector:4317; https:// "
        "takes TLS. By default none are made.",
    )
    ssl_certfile: Path | None = Field(
        None, description="Certificate, PEM, that the ports for clients show; read again when it changes."
    )
    ssl_keyfile: Path | None = Field(None, description="Its private key, PEM; goes with ssl_certfile.")
    api_keys_file: Path | None = Field(
        None,
        description="YAML file with tenants, the hashes of their API keys and their limits, read again when it "
        "changes. Clients without one of these keys are denied; by default no key is asked for.",
    )


class WorkerConfig(ServingConfig):
    """Settings of a worker."""

    kind = "worker"

    role: Role = Field(description="What routers place on this worker, until it is given another role.")
    worker_id: str = Field(
        min_length=1, max_length=128, pattern=r"^[!-~]+$", description="Stable name of this worker, in ASCII."
    )
    incarnation: int | None = Field(
        None,
        ge=1,
        lt=2**64,
        description="Identity of this process start, greater than all before; by the clock unless a launcher sets it.",
    )
    launch_id: str = Field(
        "",
        max_length=64,
        pattern=r"^[!-~]*$",
        description="What launched this process, in ASCII: on Kubernetes the uid of its pod.",
    )
    termination_message_file: Path | None = Field(
        None,
        description="File into which the incarnation is written at the start: on Kubernetes, /dev/termination-log lets "
        "the status of an ended container name its process.",
    )
    routers: tuple[str, ...] = Field(
        (),
        description="Internal addresses of the routers, host:port. Each address that a host's name leads to is a "
        "router; names are looked up again every ten seconds. At least one, unless dialect_port is set.",
    )
    dialect_host: str = Field("127.0.0.1", description="Host on which clients of this worker itself are awaited.")
    dialect_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port on which this worker answers clients itself, with a router's gRPC APIs, while its role is "
        "decode or mixed; 0 takes a free one. By default it is off.",
    )
    page_size: int = Field(
        PAGE_SIZE,
        ge=BLOCK_TOKENS,
        le=1024,
        multiple_of=BLOCK_TOKENS,
        description=f"Token slots in a KV page, of the smallest where layers' pages differ; on a GPU {GPU_PAGE_SIZE} "
        "unless set.",
    )
    num_pages: int | None = Field(
        None,
        ge=1,
        description="KV pages; by default as many as fit into kv_cache_memory_bytes, or on a GPU into its memory.",
    )
    kv_cache_memory_bytes: int = Field(
        2**30, ge=1, description="Bytes for KV pages, taken soon after the start, unless num_pages is set."
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0.0,
        le=1.0,
        description="Share of a GPU's memory for weights, a step and KV pages, unless the pages are set otherwise.",
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="Longest sequence, prompt and answer; by default the model's limit.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences in one step.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens in one step, in any role; by default 2048 while its role is prefill, where hardly anything "
        "decodes beside it, or 512.",
    )
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and KV, the same for all workers. auto: bfloat16, or float32 on a processor that "
        "multiplies that slowly.",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        "auto",
        description="Type of K and V in pages. auto: that of dtype. fp8_e4m3, int8: a byte a value, with a scale for "
        "each token and KV head.",
    )
    quantization: Quantization = Field(
        "auto",
        description="Form of the weights, the same for all workers. auto keeps the codes of a file where dtype is "
        "bfloat16, or on a GPU float16. none: floats. awq, compressed-tensors, gguf, gptq: as the file has them. "
        "int8, int4: rounded to so many bits when read.",
    )
    quantized_inputs: QuantizedInputs = Field(
        16,
        description="Bits of the inputs of quantized products, the same for all workers. 16 gives the answers of the "
        "dequantized weights; 8 takes less time on a CPU where many tokens are computed at once, and on a GPU is for "
        "weights of 8 bits; refused where no product of the weights takes such inputs.",
    )
    shared_weights_dir: Path | None = Field(
        None,
        description="Folder for weights that workers on the same machine's CPU map together. Those with the same "
        "folder share out the processors, too. By default nothing is shared. `pdserve up` sets it.",
    )
    device: Device = Field(
        "auto",
        description="Where the engine runs. auto is the CPU: cuda has not been tried on a GPU yet. interpreter, for "
        "testing, is the GPU's engine on a CPU, in Triton's interpreter.",
    )
    attention_backend: AttentionBackend = Field(
        "auto",
        description="What computes attention over prompts on a GPU. auto: Triton's kernels. flashinfer: that library, "
        "if it is installed and agrees with them on this device; nobody has measured it yet.",
    )
    speculative_config: SpeculativeSetting = Field(
        None,
        description='Speculative decoding, as JSON such as {"method": "ngram"}: tokens are guessed, and a step '
        "verifies as many guesses as pay. Changes no token. By default it is off.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Processes that hold this worker's model together and compute each step. On CPUs they share its "
        "threads; with cuda each has a GPU of its own, which is tried on a CPU alone.",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Processes that each hold a part of this worker's layers, and compute each step one after the "
        "other, on CPUs; they share its threads. Goes with tensor_parallel_size 1 alone.",
    )
    rank_memory: RankMemory = Field(
        "shared",
        description="Who keeps KV pages: shared, all ranks in one memory; own, each rank its heads or layers alone, as "
        "several ranks on GPUs always do. Workers of both kinds exchange no pages.",
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="dummy: random weights.")
    seed: int = Field(0, ge=0, lt=2**64, description="Seed of dummy weights.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the engine; by default one for each core.")
    stalled_step_s: float = Field(
        600.0, ge=1.0, description="Seconds a step may take; a worker whose step hangs for longer ends its process."
    )
    max_quarantined_share: float = Field(
        0.5,
        gt=0.0,
        le=1.0,
        description="Share of the pages in quarantine, for lost peers may still write or read them, above which this "
        "worker drains and exits.",
    )
    kv_events_endpoint: str | None = Field(
        None,
        description="Where KV events are published over ZMQ in vLLM's format: tcp://127.0.0.1:port or ipc://path, "
        "for subscribers on this machine.",
    )
    kv_events_replay_endpoint: str | None = Field(None, description="Where subscribers ask for KV events they missed.")
    kv_events_topic: str = Field("", description="Topic of published KV events.")
    kv_events_buffer_steps: int = Field(10_000, ge=1, description="Batches of KV events kept for replay.")
    handoff_host: str = Field(
        "127.0.0.1",
        description="Address of this worker in the network that carries pages; senders are awaited there.",
    )
    handoff_port: int = Field(0, ge=0, le=65535, description="Port for workers that send pages; 0 takes a free one.")
    handoff_advertise: str | None = Field(
        None, description="host or host:port that workers which send pages connect to; by default what was bound."
    )
    lease_s: float = Field(
        4.0,
        ge=1.5,  # three beats of a worker
        le=3600.0,
        description="Seconds after which a worker that sends pages here and is silent loses what it was granted.",
    )
    digests: Literal["always", "off"] = Field(
        "always", description="Whether digests of pages that arrive are compared before the pages are used."
    )
    slow_pair_bytes_per_s: int = Field(
        500_000_000, ge=0, description="Bandwidth to another worker below which the pair is called slow; 0: never."
    )
    handoff_rdma_devices: tuple[str, ...] = Field(
        (), description="RDMA devices that carry pages too, as UCX names them, such as mlx5_0:1; repeatable."
    )
    handoff_transport: Literal["auto", "tcp"] = Field(
        "auto",
        description="tcp: nixl takes TCP alone, within a machine as well. auto: shared memory there, RDMA where named.",
    )
    mover: Literal["nixl", "collective"] = Field(
        "nixl",
        description="What carries pages between workers; collective is torch.distributed's gloo over TCP, "
        "and copies a GPU's pages through host memory.",
    )
    test_fail_copies: float = Field(
        0.0, ge=0.0, le=1.0, description="For testing alone: share of the copies between workers that are made to fail."
    )
    test_step_s: float = Field(
        0.0,
        ge=0.0,
        le=10.0,
        description="For testing alone: seconds that a step takes at least, and as many again for each 512 of its "
        "tokens, as if each worker of a machine had a device of its own.",
    )

    nnodes: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Machines that this worker's ranks are on, as many on each. All but this one run `pdserve "
        "worker-node`. More than 1 goes with ranks that have memory of their own.",
    )
    master_port: int = Field(
        0, ge=0, le=65535, description="Port on handoff_host where the other machines join this worker; 0: a free one."
    )
    join_timeout_s: float = Field(
        600.0, gt=0.0, le=86_400.0, description="Seconds that all other machines of this worker have to join it."
    )

    @property
    def step_tokens(self) -> dict[Role, int]:
        """Tokens in one step, by role. A step has room for at least one token of each sequence."""
        own = self.max_num_batched_tokens
        return {role: own or max(count, self.max_num_seqs) for role, count in STEP_TOKENS.items()}

    @property
    def degrees(self) -> Degrees:
        """How the model is divided among processes."""
        return Degrees(self.tensor_parallel_size, self.pipeline_parallel_size, self.nnodes)

    @model_validator(mode="after")
    def _is_reached(self) -> Self:
        if not self.routers and self.dialect_port is None:
            raise ValueError("routers: at least one is needed, unless dialect_port is set")
        return self

    @model_validator(mode="after")
    def _has_its_device(self) -> Self:
        if self.attention_backend == "flashinfer" and self.device != "cuda":
            raise ValueError(f"attention_backend: flashinfer needs device cuda, not {self.device}")
        guessed, kv_dtype = self.speculative_config, self.kv_cache_dtype
        if self.attention_backend == "flashinfer" and kv_dtype != "auto":
            raise ValueError(f"kv_cache_dtype: {kv_dtype} is not served with attention_backend flashinfer")
        problem = self.degrees.problem(self.device)
        beside: dict[str, object] = {"device": self.device, "mover": self.mover}
        beside |= {"role": self.role.value, "attention_backend": self.attention_backend}
        if guessed is not None:
            problem = problem or guessed.problem(self)
        problem = problem or rank_memory_problem(self.rank_memory, self.degrees, beside)
        if problem := problem or nodes_problem(self):
            raise ValueError(problem)
        return self

    @model_validator(mode="before")
    @classmethod
    def _choose_by_device(cls, given: Any) -> Any:  # noqa: ANN401 - whatever is to be validated
        """Use the GPU's page size if a GPU is asked for, and memory of their own for ranks that have devices."""
        if isinstance(given, Mapping) and given.get("device") == "cuda":
            given = {"page_size": GPU_PAGE_SIZE, **given}
        return {"rank_memory": "own", **given} if isinstance(given, Mapping) and is_own_unasked(given) else given


def load_config(cls: type[_Config], file: Path | None = None, flags: Mapping[str, object] | None = None) -> _Config:
    """Return the settings of `file`, overridden by `flags` that are not None; ConfigError names each wrong key."""
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    return read_model(cls, file, given)
