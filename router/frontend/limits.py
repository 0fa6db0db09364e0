"""What tenants use of their limits. Pure: requests in, refusals out.

Invariant: over any time, a tenant begins at most its burst and its rate times that time in requests; at most
max_concurrent of them are under way; and none begins while more tokens were charged than its rate allows. A prompt is
charged when its length is known, an answer as a whole when it ends: those under way together may overdraw by as much.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil, inf

from pdserve.clock import Clock
from pdserve.errors import Status
from pdserve.router.because import Because, Cause
from pdserve.router.commands import Refused
from pdserve.router.frontend.clients import TenantLimits

BUSY_RETRY_S = 1.0  # when one of a tenant's requests ends is not known


@dataclass(slots=True)
class Bucket:
    """Fills at a rate up to a size; may be overdrawn."""

    level: float = inf  # cut to its size when it is looked at
    at_s: float = 0.0

    def fill(self, rate: float, size: float, now_s: float) -> float:
        """Return the level at a moment."""
        self.level = min(size, self.level + rate * max(0.0, now_s - self.at_s))
        self.at_s = max(self.at_s, now_s)
        return self.level


class Use:
    """What one tenant uses."""

    def __init__(self) -> None:
        self.num_running = 0
        self._requests = Bucket()
        self._tokens = Bucket()

    def begin(self, limits: TenantLimits, now_s: float) -> Refused | None:
        """Take a request in, which must `end`; or return why not, and change nothing."""
        if limits.max_concurrent is not None and self.num_running >= limits.max_concurrent:
            text = f"max_concurrent: {self.num_running} requests of this tenant are under way, the limit"
            return _refused(Cause.TENANT_CONCURRENCY, text, BUSY_RETRY_S)
        if limits.tokens_per_s is None:
            self._tokens = Bucket()  # what is used without a limit is no debt under a later one
        else:
            rate = limits.tokens_per_s
            level = self._tokens.fill(rate, rate, now_s)
            if level <= 0:
                text = f"tokens_per_s: this tenant may use {rate:g} tokens a second"
                return _refused(Cause.TENANT_TOKENS, text, (1.0 - level) / rate)
        if limits.requests_per_s is not None:
            rate = limits.requests_per_s
            level = self._requests.fill(rate, limits.burst or max(1, ceil(rate)), now_s)
            if level < 1:
                text = f"requests_per_s: this tenant may send {rate:g} requests a second"
                return _refused(Cause.TENANT_REQUESTS, text, (1.0 - level) / rate)
            self._requests.level -= 1
        self.num_running += 1
        return None

    def spend(self, num_tokens: int) -> None:
        """Note tokens of a prompt, or of an answer that has ended."""
        self._tokens.level -= num_tokens

    def end(self) -> None:
        """Note that a request has ended."""
        self.num_running -= 1


class Uses:
    """What each tenant uses, and how often that was refused. The `Tenants` of a router."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[str, Use] = {}  # of all tenants that have called: as many as the file of keys has named
        self.denied: Counter[str] = Counter()  # calls, by what was wrong
        self.over_limit: Counter[Cause] = Counter()  # requests, by the limit

    async def begin(self, tenant: str, limits: TenantLimits) -> Refused | None:
        return self.admit(tenant, limits)

    def admit(self, tenant: str, limits: TenantLimits) -> Refused | None:
        """Begin a request at once."""
        refused = self._uses.setdefault(tenant, Use()).begin(limits, self._clock.now_s())
        if refused is not None and refused.because is not None:
            self.over_limit[refused.because.cause] += 1
        return refused

    def spend(self, tenant: str, num_tokens: int) -> None:
        self._uses[tenant].spend(num_tokens)

    def end(self, tenant: str) -> None:
        self._uses[tenant].end()

    def deny(self, reason: str) -> None:
        self.denied[reason] += 1


def _refused(cause: Cause, text: str, retry_after_s: float) -> Refused:
    return Refused(Status.RESOURCE_EXHAUSTED, text, retry_after_s=retry_after_s, because=Because(cause, text))
