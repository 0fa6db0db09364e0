"""Settings that every process has."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class ProcessConfig(BaseModel):
    """Settings of every process. They never change after its start."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    kind: ClassVar[str] = "process"  # whose setting it is, if the help of a flag must say so

    log_level: LogLevel = Field("info", description="Least severe records that are logged.")
    log_format: LogFormat = Field(
        "text", description="How records are written to stderr, one on each line; json: as objects with request ids."
    )
    drain_timeout_s: float = Field(
        25.0,
        ge=0.0,
        description="Seconds that running requests have to finish after SIGTERM, SIGINT or SIGHUP; what is left is "
        "ended. Kubernetes kills 30 s after SIGTERM by default.",
    )
    metrics: bool = Field(True, description="Show metrics over HTTP, at /metrics.")
    metrics_host: str = Field(
        "127.0.0.1", description="Host on which metrics are shown. Whoever reaches it may read them."
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Port for metrics; 0 takes a free one.")
    health_host: str = Field(
        "127.0.0.1", description="Host on which grpc.health.v1 is served, without TLS: live, ready and started."
    )
    health_port: int = Field(0, ge=0, le=65535, description="Port for health; 0 takes a free one.")
    identity_dir: Path | None = Field(
        None,
        description="Folder with tls.crt, tls.key and ca.crt, read again when they change: all internal connections "
        "are mutual TLS. By default none is: they are plain gRPC.",
    )
