"""The clients of the public ports: the file that names them, their keys, and what their tenants may ask for.

    tenants:
      acme:
        keys:
          - {id: web, sha256: 5f2b...}   # hash of a key; two at once, while clients change over
        max_priority: 10
        requests_per_s: 20
        max_concurrent: 64

Keys are long random strings, so their plain hashes give nothing away. Each endpoint translates the errors.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from pdserve.base.errors import ConfigError
from pdserve.base.files import read_private
from pdserve.base.values import value
from pdserve.base.watched_files import Watched
from pdserve.base.yaml_models import read_model
from pdserve.protocol.refusal import Cause, Refused, RefusedError

KEY_PREFIX = "pds_"
KEY_BYTES = 32
INDEX_BYTES = 16  # of a hash, by which keys are found; no two keys of a file share them
METADATA_KEY = "authorization"
SCHEME = "bearer "
HANDSHAKE = "handshake"
DENIALS = (Cause.NO_KEY.value, Cause.WRONG_KEY.value, HANDSHAKE)
_NO_KEY = Refused(Cause.NO_KEY, "no API key is shown: authorization: Bearer KEY")
_WRONG_KEY = Refused(Cause.WRONG_KEY, "the API key is not known here")

TenantName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[!-~]+$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # the input may be a key


class KeyHash(_Model):
    id: str = Field(min_length=1, max_length=64, description="Names the key in logs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal.")


class TenantLimits(_Model):
    """What a tenant may ask for, by all its keys together. What is left out is not limited."""

    max_priority: int = Field(0, ge=-(2**31), lt=2**31, description="Requests of a higher priority get this one.")
    requests_per_s: float | None = Field(None, gt=0, le=1e6, description="Requests a second, on average.")
    burst: int | None = Field(
        None, ge=1, le=10**6, description="Requests that may come at once; by default those of a second."
    )
    tokens_per_s: float | None = Field(
        None, gt=0, le=1e9, description="Tokens a second on average, of prompts and answers together."
    )
    max_concurrent: int | None = Field(None, ge=1, le=10**6, description="Requests under way at once.")


class Tenant(TenantLimits):
    keys: tuple[KeyHash, ...] = Field(description="Any of these is taken; with none, the tenant is locked out.")


class KeysFile(_Model):
    tenants: dict[TenantName, Tenant]

    @model_validator(mode="after")
    def _each_key_is_one_tenants(self) -> "KeysFile":
        hashes = [key.sha256[: 2 * INDEX_BYTES] for tenant in self.tenants.values() for key in tenant.keys]
        if len(set(hashes)) < len(hashes):
            raise ValueError("tenants: a key is there twice")
        return self


@value
class Client:
    """The owner of a key."""

    tenant: str
    limits: TenantLimits


class ApiKeys:
    """The clients of a file, by their keys."""

    def __init__(self, file: KeysFile) -> None:
        hashes = [(bytes.fromhex(key.sha256), name) for name, tenant in file.tenants.items() for key in tenant.keys]
        self._clients = {digest[:INDEX_BYTES]: (digest, Client(name, file.tenants[name])) for digest, name in hashes}

    def find(self, key: bytes) -> Client | None:
        """Return the owner of a key. The time that this takes tells a caller nothing about any key.

        The lookup is by hash: a caller who learnt how much of a hash is right could not make a key from that.
        """
        digest = hashlib.sha256(key).digest()
        known, client = self._clients.get(digest[:INDEX_BYTES], (bytes(len(digest)), None))
        return client if hmac.compare_digest(known, digest) else None


def read_keys(path: Path) -> ApiKeys:
    """Read the file; ConfigError names line and field of what is wrong, or says that others could write the file."""
    read_private(path, "api_keys_file")
    try:
        return ApiKeys(read_model(KeysFile, path))
    except ConfigError as error:
        raise ConfigError(f"api_keys_file: {error}") from error


def bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes | None:
    """Return the key that a call shows, `authorization: Bearer KEY`; None where it shows none."""
    for name, shown in metadata or ():
        if name == METADATA_KEY and isinstance(shown, str) and shown[: len(SCHEME)].lower() == SCHEME:
            return shown[len(SCHEME) :].strip().encode()
    return None


def new_key() -> tuple[str, str]:
    """Return a key, and its hash as the file has it."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


class Tenants(Protocol):
    """Counts what tenants use of their limits, in all processes that serve clients together."""

    async def begin(self, tenant: str, limits: TenantLimits) -> Refused | None:
        """Admit a request, whose `end` follows; or return why not, and change nothing."""

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Count tokens of a prompt, or of an answer that has ended."""

    def end(self, tenant: str) -> None:
        """Count a request as ended."""

    def deny(self, reason: str) -> None:
        """Count a call or a connection that is denied; `reason` is one of DENIALS."""


class Clients:
    """The clients of one router."""

    def __init__(self, file: Path | None, tenants: Tenants) -> None:
        """`file`: the API keys; None: callers need no key."""
        self._keys = None if file is None else Watched((file,), partial(read_keys, file))
        self._tenants = tenants

    @property
    def num_refused_files(self) -> int:
        """How often a file that had changed was refused."""
        if self._keys is None:
            return 0
        self._keys.look()  # all calls may go to other processes, and only calls look at the file
        return self._keys.num_refused

    def note_failed_handshake(self) -> None:
        """Count a connection over which TLS was not established."""
        self._tenants.deny(HANDSHAKE)

    def identify(self, key: bytes | None) -> Client | None:
        """Return the owner of a call's key; None where callers need no key. RefusedError for another one, or none."""
        if self._keys is None:
            return None
        client = None if key is None else self._keys.look().find(key)
        if client is None:
            denied = _NO_KEY if key is None else _WRONG_KEY
            self._tenants.deny(denied.cause.value)
            raise RefusedError(denied)
        return client

    def tenant(self, key: bytes | None) -> str:
        """Return the tenant of a call's key, empty where callers need no key. Raises what `identify` raises."""
        client = self.identify(key)
        return "" if client is None else client.tenant

    def counted_by(self, tenants: Tenants) -> "Clients":
        """Return the same clients, whose requests other routers count: limits hold for each model on its own."""
        clients = Clients(None, tenants)
        clients._keys = self._keys
        return clients

    async def visit(self, client: Client | None) -> "Visit":
        """Begin a request; its visit must `end` once. RefusedError where the tenant has used its limits."""
        if client is not None:
            refused = await self._tenants.begin(client.tenant, client.limits)
            if refused is not None:
                raise RefusedError(refused)
        return Visit(client, self._tenants)


@value
class Visit:
    """One request of a client. Nothing is counted where callers need no key: then `client` is None."""

    client: Client | None
    tenants: Tenants
    is_part: bool = False  # of another visit, which alone counts against limits of requests

    def part(self) -> "Visit":
        """Return the visit of a request that is a part of this one's call."""
        return replace(self, is_part=True)

    def spend(self, num_tokens: int) -> None:
        """Count tokens of its prompt, or of its answer once that has ended."""
        if self.client is not None:
            self.tenants.spend(self.client.tenant, num_tokens)

    def end(self) -> None:
        if self.client is not None and not self.is_part:
            self.tenants.end(self.client.tenant)
