"""What tenants use of their limits. Pure: requests in, refusals out.

Invariant: in any period a tenant begins at most burst + rate * period requests; at most max_concurrent of them are
under way; and no request begins while more tokens were charged than the rate allows. A prompt is charged when its
length is known, an answer as a whole when it ends. So requests under way may overdraw the limit by their answers.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil, inf

from pdserve.base.clock import Clock
from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.frontend.clients import TenantLimits

BUSY_RETRY_S = 1.0  # nobody knows when one of the requests under way will end


@dataclass(slots=True)
class Bucket:
    """A token bucket that may be overdrawn."""

    level: float = inf  # `fill` cuts it to the bucket's size
    at_s: float = 0.0

    def fill(self, rate: float, size: float, now_s: float) -> float:
        """Fill the bucket for the time that has passed; return its level."""
        self.level = min(size, self.level + rate * max(0.0, now_s - self.at_s))
        self.at_s = max(self.at_s, now_s)
        return self.level


class Use:
    """What one tenant uses of its limits."""

    def __init__(self) -> None:
        self.num_running = 0
        self._requests = Bucket()
        self._tokens = Bucket()

    def begin(self, limits: TenantLimits, now_s: float) -> Refused | None:
        """Admit a request, which must `end` later; or return why not, and change nothing."""
        if limits.max_concurrent is not None and self.num_running >= limits.max_concurrent:
            text = f"max_concurrent: {self.num_running} requests of this tenant are under way, the limit"
            return Refused(Cause.TENANT_CONCURRENCY, text, retry_after_s=BUSY_RETRY_S)
        if limits.tokens_per_s is None:
            self._tokens = Bucket()  # tokens used without a limit do not count against a later limit
        else:
            rate = limits.tokens_per_s
            level = self._tokens.fill(rate, rate, now_s)
            if level <= 0:
                text = f"tokens_per_s: this tenant may use {rate:g} tokens a second"
                return Refused(Cause.TENANT_TOKENS, text, retry_after_s=(1.0 - level) / rate)
        if limits.requests_per_s is not None:
            rate = limits.requests_per_s
            level = self._requests.fill(rate, limits.burst or max(1, ceil(rate)), now_s)
            if level < 1:
                text = f"requests_per_s: this tenant may send {rate:g} requests a second"
                return Refused(Cause.TENANT_REQUESTS, text, retry_after_s=(1.0 - level) / rate)
            self._requests.level -= 1
        self.num_running += 1
        return None

    def spend(self, num_tokens: int) -> None:
        """Charge tokens of a prompt, or of an answer that has ended."""
        self._tokens.level -= num_tokens

    def end(self) -> None:
        self.num_running -= 1


class Uses:
    """What each tenant uses, and how often requests were refused. The `Tenants` in a router's process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._uses: dict[str, Use] = {}  # of tenants that have called; all of them were in the file of keys
        self.denied: Counter[str] = Counter()  # calls, by reason
        self.over_limit: Counter[Cause] = Counter()  # requests, by limit

    async def begin(self, tenant: str, limits: TenantLimits) -> Refused | None:
        return self.begin_now(tenant, limits)

    def begin_now(self, tenant: str, limits: TenantLimits) -> Refused | None:
        refused = self._uses.setdefault(tenant, Use()).begin(limits, self._clock.now_s())
        if refused is not None:
            self.over_limit[refused.cause] += 1
        return refused

    def take_over(self, tenant: str, num_requests: int) -> None:
        """Count requests under way that another router has admitted."""
        self._uses.setdefault(tenant, Use()).num_running += num_requests

    def spend(self, tenant: str, num_tokens: int) -> None:
        self._uses[tenant].spend(num_tokens)

    def end(self, tenant: str) -> None:
        self._uses[tenant].end()

    def deny(self, reason: str) -> None:
        self.denied[reason] += 1
