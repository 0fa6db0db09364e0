"""Who may call the public doors: clients with a key of the file. Knows no protocol; doors translate what it raises."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

from pdserve.clock import Clock
from pdserve.errors import echo, invalid
from pdserve.router.because import Cause
from pdserve.router.commands import Refused
from pdserve.router.frontend.api_keys import ApiKeys, Client, read_keys
from pdserve.router.frontend.limits import Use
from pdserve.router.frontend.prompts import Terms
from pdserve.values import value
from pdserve.watched import Watched

NO_KEY, WRONG_KEY = DENIALS = ("no_key", "wrong_key")
_TEXTS = {NO_KEY: "no API key is shown: authorization: Bearer KEY", WRONG_KEY: "the API key is not known here"}


class DeniedError(Exception):
    """The caller shows no key, or a wrong one. `reason` is one of DENIALS."""

    def __init__(self, reason: str) -> None:
        super().__init__(_TEXTS[reason])
        self.reason = reason
        self.message = _TEXTS[reason]


class OverLimitError(Exception):
    """The caller's tenant asks for more than its limits; `refused` has the hints for trying again."""

    def __init__(self, refused: Refused, tenant: str) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.tenant = tenant


class Clients:
    """The clients of one router, and what they use of their limits."""

    def __init__(self, file: Path | None, clock: Clock) -> None:
        """`file`: the API keys; None asks nobody for one."""
        self._keys = None if file is None else Watched((file,), partial(read_keys, file))
        self._seen: ApiKeys | None = None
        self._clock = clock
        self._uses: dict[str, Use] = {}  # by tenant
        self.denied: Counter[str] = Counter()  # calls, by what was wrong
        self.over_limit: Counter[Cause] = Counter()  # requests, by the limit

    @property
    def num_refused_files(self) -> int:
        """How often a file that had changed was refused."""
        return 0 if self._keys is None else self._keys.num_refused

    def identify(self, key: bytes | None) -> Client | None:
        """Return whose key a call shows; None where no keys are asked for. Raises DeniedError."""
        if self._keys is None:
            return None
        keys = self._keys.look()
        if keys is not self._seen:
            self._seen = keys
            self._uses = {name: use for name, use in self._uses.items() if name in keys.tenants or use.num_running}
        client = None if key is None else keys.find(key)
        if client is None:
            reason = NO_KEY if key is None else WRONG_KEY
            self.denied[reason] += 1
            raise DeniedError(reason)
        return client

    def visit(self, key: bytes | None) -> "Visit | None":
        """Take a request in, whose visit must `end` once; None where no keys are asked for.

        Raises DeniedError, and OverLimitError where the tenant has used its limits.
        """
        client = self.identify(key)
        if client is None:
            return None
        use = self._uses.setdefault(client.tenant, Use())
        refused = use.begin(client.limits, self._clock.now_s())
        if refused is not None:
            if refused.because is not None:
                self.over_limit[refused.because.cause] += 1
            raise OverLimitError(refused, client.tenant)
        return Visit(client, use)


@value
class Visit:
    """One request of a client."""

    client: Client
    use: Use  # of the client's tenant

    def terms(self, asked: Terms) -> Terms:
        """Return what the client may have of a request's terms; RequestError where it claims to be another."""
        tenant, limits = self.client.tenant, self.client.limits
        if asked.tenant not in ("", tenant):
            raise invalid("tenant", f"{echo(asked.tenant, repr)} is not the tenant of this API key, {tenant!r} is")
        return replace(asked, tenant=tenant, priority=min(asked.priority, limits.max_priority))
