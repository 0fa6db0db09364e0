"""A router's configuration."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from pdserve.base.yaml_models import FieldError, parsed_json
from pdserve.settings.config import ServingConfig

Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$", to_lower=True)]
PolicyName = Literal["goodput", "least_loaded", "round_robin"]


class Limits(BaseModel):
    """Bounds of what the core keeps and waits for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests placed at once; by default twice what the attached decode workers decode at once.",
    )
    max_num_held: int = Field(default=1024, ge=0, description="Requests that wait for a place.")
    max_hold_s: float = Field(
        default=0.02,
        ge=0,
        description="Seconds that a request with objectives waits for room that keeps them, before it is refused.",
    )
    max_attempts: int = Field(
        default=3, ge=1, description="Placements of a request that may fail where they are computed."
    )
    max_interruptions: int = Field(
        default=8, ge=1, description="Placements of a request that may fail because of their peers."
    )
    pool_grace_s: float = Field(
        default=30.0, ge=0, description="Seconds that requests wait for workers while no pair can serve."
    )
    scale_to_zero: bool = Field(
        default=False,
        description="Pools may have no workers while no request comes: requests wait for the first ones until their "
        "deadline, and that time does not count against their objectives.",
    )
    worker_silence_s: float = Field(
        default=4.0,
        ge=1.5,  # three beats of a worker
        description="Seconds without a message after which a ready worker's requests are placed again elsewhere.",
    )
    local_prefill: bool = Field(
        default=False, description="Let decode workers compute prompts themselves where that is better."
    )
    converts_kv: bool = Field(
        default=True,
        description="Pair workers whose K and V differ in type (kv_cache_dtype): the sender converts pages. Without, "
        "such workers are not paired.",
    )


class ModelSettings(BaseModel):
    """What clients are shown of a model, and how its answers are read."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    served_model_aliases: tuple[str, ...] = Field(
        (), description="More names of the model in requests, listed beside the first; repeatable."
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto",
        description="auto: sampling that a request leaves out is as the model's generation_config.json says; its "
        "max_new_tokens limits every answer. vllm: the API's defaults alone.",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="How the model writes tool calls; auto: as its chat template says, else as Hermes does."
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto",
        description="think: what answers have between <think> and </think> is reasoning. auto: if the chat template "
        "knows these.",
    )
    allow_special_tokens_in_text: bool = Field(
        False,
        description="Let texts of chats that spell special tokens make them. By default these stay text: only the "
        "chat template makes special tokens.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest sequence, prompt and answer; by default what all workers can hold."
    )
    lenient_schemas: bool = Field(
        False,
        description="Ignore keywords of JSON schemas that no grammar can follow, such as uniqueItems and not, instead "
        "of refusing the request.",
    )


class EndpointConfig(ModelSettings, ServingConfig):
    """Settings of a process that serves clients: a frontend, or a router that serves them itself."""

    host: str = Field("127.0.0.1", description="Host on which clients are awaited.")
    port: int = Field(50051, ge=0, le=65535, description="Port for clients; 0 takes a free one.")
    http_host: str = Field("127.0.0.1", description="Host on which clients of the HTTP API are awaited.")
    http_port: int | None = Field(
        None, ge=0, le=65535, description="Port for OpenAI's API over HTTP; 0 takes a free one. By default it is off."
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Names by which clients without API keys reach the HTTP API, besides loopback's, as behind a "
        "proxy; without ports; repeatable.",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        (),
        description="Origins, such as https://chat.example, whose web pages may use the HTTP API (CORS); * for all; "
        "repeatable.",
    )
    otlp_traces_sample_ratio: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="Share that is traced of the requests whose clients do not decide it.",
    )
    enable_log_requests: bool = Field(False, description="Log a line at each request's end, with its ids and figures.")
    max_deadline_ms: int = Field(600_000, ge=1, lt=2**32, description="Milliseconds a request may take at most.")
    max_unsent_bytes: int = Field(
        65536, ge=1024, description="Bytes of an answer that may wait for its client to read."
    )
    stream_interval: int | None = Field(
        None,
        ge=1,
        description="Tokens of an answer that are written together. By default each one at once, but where steps take "
        "less than 16 ms, those of about 16 ms together. The first one is always written at once.",
    )
    max_num_tokenizing: int = Field(64, ge=1, description="Prompts that are or wait to be tokenized.")
    tokenize_timeout_s: float = Field(10.0, gt=0, description="Seconds that tokenizing a prompt may take.")
    responses_file: Path | None = Field(
        None,
        description="SQLite file that keeps responses and conversations of OpenAI's Responses API; processes on this "
        "machine may share it. By default each process keeps its own in memory.",
    )
    responses_ttl_s: float = Field(
        2_592_000.0, gt=0, description="Seconds without use after which responses and conversations are forgotten."
    )
    max_num_stored: int = Field(
        1000,
        ge=1,
        description="Responses and conversations kept of each tenant; beyond, those used longest ago are forgotten.",
    )
    max_stored_bytes: int = Field(
        64 << 20, ge=16 << 20, description="Bytes kept of each tenant's responses and conversations, likewise."
    )
    max_num_background: int = Field(
        64, ge=0, description="Responses that a process computes in the background at once; more are refused."
    )

    @property
    def may_share_ports(self) -> bool:
        """Whether other processes may listen on the same ports."""
        return False


class RouterConfig(Limits, EndpointConfig):
    """Everything that a router is configured with. Never changes afterwards."""

    serve_clients: bool = Field(
        True,
        description="Serve clients in the router's own process. Without, frontends alone do so: their connections "
        "outlive the router.",
    )
    internal_host: str = Field("127.0.0.1", description="Host on which workers and operators are awaited.")
    internal_port: int = Field(50052, ge=0, le=65535, description="Port for workers; 0 takes a free one.")
    router_id: str = Field("router", min_length=1, max_length=128, description="Name of this router.")
    placement: PolicyName = Field("goodput", description="How a pair of workers is chosen for a request.")
    kv_events: Literal["link", "off"] = Field(
        "link",
        description="Whether workers report on their links which prefixes they hold.",
    )
    profile: Path | None = Field(
        None, description="Measured step costs to start from (`pdserve profile` writes them); they are learnt anyway."
    )


Routers = Annotated[
    tuple[str, ...],
    Field(
        description="Internal addresses of all routers, host:port; a host may have several addresses. One of them has "
        "this frontend's requests; when it is lost, another one gets them, or its successor."
    ),
]


class ServedModelConfig(ModelSettings):
    """One of the models of a frontend that serves several. What is left out is as the frontend has it."""

    model: str = Field(min_length=1, description="As the frontend's setting of this name.")
    served_model_name: str | None = Field(None, min_length=1, description="Name of the model in requests.")
    routers: Routers = Field(min_length=1)


OF_ONE_MODEL = ("model", "served_model_name", "served_model_aliases", "routers")


class FrontendConfig(EndpointConfig):
    """Settings of a frontend: a process of its own that serves clients, for the routers of a model or of several."""

    kind = "frontend"

    model: str = Field("", description="As a worker's. Either this or `models` is needed.")

    frontend_id: str = Field("frontend", min_length=1, max_length=128, description="Name of this frontend.")
    routers: Routers = ()
    router_grace_s: float = Field(
        30.0, ge=0, description="Seconds that requests wait for a router while none is attached."
    )
    max_num_waiting: int = Field(
        1024, ge=0, description="Requests that wait while no router is attached; more are refused."
    )
    shares_ports: bool = Field(
        False, description="Let frontends on this machine listen on the same ports, each for a share of the clients."
    )
    models: tuple[Annotated[ServedModelConfig, BeforeValidator(parsed_json)], ...] = Field(
        (),
        description="Several models, each with its own routers; repeatable, as JSON such as "
        '{"model": "...", "routers": ["host:port"]}. Requests choose by name.',
    )

    def of_models(self) -> "tuple[FrontendConfig, ...]":
        """Return the settings as they hold for each model."""
        if not self.models:
            return (self,)
        given = ({name: getattr(each, name) for name in each.model_fields_set} for each in self.models)
        return tuple(self.model_copy(update={"models": (), **own}) for own in given)

    @model_validator(mode="after")
    def _has_models(self) -> Self:
        for key in OF_ONE_MODEL:
            if self.models and key in self.model_fields_set:
                raise FieldError((key,), "goes with one model; with several, each of `models` has its own")
        for key, given in (("model", self.model), ("routers", self.routers)):
            if not (self.models or given):
                raise FieldError((key,), "is required, unless `models` are set")
        names = [each.served_model_name for each in self.models if each.served_model_name]
        for name in names:
            if names.count(name) > 1:
                raise FieldError(("models",), f"served_model_name {name!r} is the name of two")
        return self

    @property
    def may_share_ports(self) -> bool:
        return self.shares_ports
