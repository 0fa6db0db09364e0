"""Checks of what a process's configuration names: the model, certificates, the secret."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pdserve.certificates import read_identity, read_pair
from pdserve.checkpoint.fetch import resolve_model
from pdserve.checkpoint.open import open_checkpoint
from pdserve.doctor.machine import Finding, failed, ok, warning
from pdserve.errors import ConfigError
from pdserve.rpc import read_secret

ENOUGH_DAYS = 14.0  # that a certificate is to last


class Settings(BaseModel):
    """What of the configuration of a router, worker or autoscaler is looked at. None: not set."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    model: str | None = None
    secret_file: Path | None = None
    identity_dir: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    handoff_host: str = "127.0.0.1"
    handoff_rdma_devices: tuple[str, ...] = ()
    policy: Path | None = None  # an autoscaler's
    policy_resource: str | None = None  # namespace/name, in its place


def settings_findings(settings: Settings, now: datetime) -> Iterator[Finding]:
    if settings.secret_file is not None:
        try:
            read_secret(settings.secret_file)
            yield ok("secret", f"{settings.secret_file}")
        except ConfigError as error:
            yield failed("secret", str(error), "mount it as a file of mode 0440 or less, 32 bytes or more")
    if settings.identity_dir is not None:
        yield _identity(settings.identity_dir, now)
    if settings.ssl_certfile is not None and settings.ssl_keyfile is not None:
        yield _public(settings.ssl_certfile, settings.ssl_keyfile, now)
    if settings.model is not None:
        yield model_finding(settings.model)


def _identity(folder: Path, now: datetime) -> Finding:
    try:
        identity = read_identity(folder)
    except ConfigError as error:
        return failed("identity", str(error), "issue certificates as docs/security.md describes")
    seen = f"{folder}: a {identity.part} of {identity.trust_domain}"
    return expiry_finding("identity", seen, identity.pair.expires, now)


def _public(certificate: Path, key: Path, now: datetime) -> Finding:
    try:
        pair = read_pair(certificate, key, ("ssl_certfile", "ssl_keyfile"))
    except ConfigError as error:
        return failed("public certificate", str(error), "issue a certificate for the name that clients use")
    return expiry_finding("public certificate", str(certificate), pair.expires, now)


def expiry_finding(name: str, seen: str, expires: datetime, now: datetime) -> Finding:
    days = (expires - now).total_seconds() / 86_400
    if days <= 0:
        return failed(name, f"{seen}, expired {abs(days):.0f} days ago", "renew it; files that change are read again")
    if days < ENOUGH_DAYS:
        return warning(name, f"{seen}, {days:.0f} days left", "renew it; files that change are read again")
    return ok(name, f"{seen}, {days:.0f} days left")


def model_finding(model: str) -> Finding:
    """Open a model's files, read its tokenizer, and see that its weights are there."""
    try:
        checkpoint = open_checkpoint(resolve_model(model))
        checkpoint.tokenizer()
        for file in checkpoint.weight_files:
            with file.open("rb") as opened:
                opened.read(1)
    except (ConfigError, OSError) as error:
        return failed("model", str(error), "fetch it again, or give the path of a Hugging Face directory or GGUF file")
    if not checkpoint.weight_files:
        return failed("model", f"{checkpoint.path} holds no weights", "fetch its safetensors files")
    size = sum(file.stat().st_size for file in checkpoint.weight_files)
    return ok(
        "model", f"{checkpoint.name} at {checkpoint.path}: {len(checkpoint.weight_files)} files, {size / 2**30:.1f} GiB"
    )


def fingerprint_of(model: str) -> str:
    """Return what identifies a model's files, empty where they cannot be read. Reads all of them, once."""
    try:
        return open_checkpoint(resolve_model(model)).fingerprint
    except (ConfigError, OSError):
        return ""
