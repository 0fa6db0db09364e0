"""The file that says which clients a public port serves: tenants, their API keys and their limits.

    tenants:
      acme:
        keys:
          - {id: web, sha256: 5f2b...}   # of a key; two at once, while clients change over
        max_priority: 10
        requests_per_s: 20
        max_concurrent: 64

Keys are long random strings, so that their plain hashes give nothing away.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from pdserve.errors import ConfigError
from pdserve.files import read_private
from pdserve.values import value
from pdserve.yaml_models import read_model

KEY_PREFIX = "pds_"
KEY_BYTES = 32
INDEX_BYTES = 16  # of a hash by which keys are found; no two keys of a file share them
METADATA_KEY = "authorization"
SCHEME = "bearer "

TenantName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[!-~]+$")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # it may be a key


class KeyHash(_Model):
    """One key of a tenant."""

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
    """A tenant's entry."""

    keys: tuple[KeyHash, ...] = Field(description="Any of these is taken; with none, the tenant is locked out.")


class KeysFile(_Model):
    """The file as a whole."""

    tenants: dict[TenantName, Tenant]

    @model_validator(mode="after")
    def _each_key_is_one_tenants(self) -> "KeysFile":
        hashes = [key.sha256[: 2 * INDEX_BYTES] for tenant in self.tenants.values() for key in tenant.keys]
        if len(set(hashes)) < len(hashes):
            raise ValueError("tenants: a key is there twice")
        return self


@value
class Client:
    """Who calls, as the key says."""

    tenant: str
    limits: TenantLimits


class ApiKeys:
    """The clients of a file, by their keys."""

    def __init__(self, file: KeysFile) -> None:
        hashes = [(bytes.fromhex(key.sha256), name) for name, tenant in file.tenants.items() for key in tenant.keys]
        self._clients = {digest[:INDEX_BYTES]: (digest, Client(name, file.tenants[name])) for digest, name in hashes}

    def find(self, key: bytes) -> Client | None:
        """Return whose key this is, in a time that says nothing of any key.

        Hashes are looked up. A caller who learnt from the time how much of one is right could not make a key of it.
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
