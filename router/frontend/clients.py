"""Who may call the public doors: clients with a key of the file. Knows no protocol; doors translate what it raises."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from pdserve.errors import echo, invalid
from pdserve.router.commands import Refused
from pdserve.router.frontend.api_keys import Client, read_keys
from pdserve.router.frontend.backend import Tenants
from pdserve.router.frontend.prompts import Terms
from pdserve.values import value
from pdserve.watched import Watched

NO_KEY, WRONG_KEY, HANDSHAKE = DENIALS = ("no_key", "wrong_key", "handshake")
_TEXTS = {NO_KEY: "no API key is shown: authorization: Bearer KEY", WRONG_KEY: "the API key is not known here"}


class DeniedError(Exception):
    """The caller shows no key, or a wrong one."""

    def __init__(self, reason: str) -> None:
        """`reason`: NO_KEY or WRONG_KEY."""
        super().__init__(_TEXTS[reason])
        self.message = _TEXTS[reason]


class OverLimitError(Exception):
    """The caller's tenant asks for more than its limits; `refused` has the hints for trying again."""

    def __init__(self, refused: Refused, tenant: str) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.tenant = tenant


class Clients:
    """The clients of one router."""

    def __init__(self, file: Path | None, tenants: Tenants) -> None:
        """`file`: the API keys; None asks nobody for one."""
        self._keys = None if file is None else Watched((file,), partial(read_keys, file))
        self._tenants = tenants

    @property
    def num_refused_files(self) -> int:
        """How often a file that had changed was refused."""
        if self._keys is None:
            return 0
        self._keys.look()  # calls may come to other processes alone
        return self._keys.num_refused

    def note_failed_handshake(self) -> None:
        """Count a connection over which TLS was not established."""
        self._tenants.deny(HANDSHAKE)

    def identify(self, key: bytes | None) -> Client | None:
        """Return whose key a call shows; None where no keys are asked for. Raises DeniedError."""
        if self._keys is None:
            return None
        client = None if key is None else self._keys.look().find(key)
        if client is None:
            reason = NO_KEY if key is None else WRONG_KEY
            self._tenants.deny(reason)
            raise DeniedError(reason)
        return client

    async def visit(self, key: bytes | None) -> "Visit | None":
        """Begin a request of the tenant; its visit must `end` once. None where no keys are asked for.

        Raises DeniedError, and OverLimitError where the tenant has used its limits.
        """
        client = self.identify(key)
        if client is None:
            return None
        refused = await self._tenants.begin(client.tenant, client.limits)
        if refused is not None:
            raise OverLimitError(refused, client.tenant)
        return Visit(client, self._tenants)


@value
class Visit:
    """One request of a client."""

    client: Client
    tenants: Tenants

    def spend(self, num_tokens: int) -> None:
        """Note tokens of its prompt, or of its answer once that has ended."""
        self.tenants.spend(self.client.tenant, num_tokens)

    def end(self) -> None:
        """Note that it has ended."""
        self.tenants.end(self.client.tenant)

    def terms(self, asked: Terms) -> Terms:
        """Return what the client may have of a request's terms; RequestError where it claims to be another."""
        tenant, limits = self.client.tenant, self.client.limits
        if asked.tenant not in ("", tenant):
            raise invalid("tenant", f"{echo(asked.tenant, repr)} is not the tenant of this API key, {tenant!r} is")
        return replace(asked, tenant=tenant, priority=min(asked.priority, limits.max_priority))
