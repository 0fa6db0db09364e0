"""Virtual token counters: which tenant has been served least, of those that wait.

The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): each served token
is charged to its tenant, and among those that wait the one with the smallest counter is next. A tenant that had
nothing waiting is lifted to the others' level when it comes again, so nobody saves up a claim while away; a counter is
never lowered, so no debt is forgotten while its tenant is known.
"""

from dataclasses import dataclass

PROMPT_WEIGHT = 1  # of a token, as in the paper
OUTPUT_WEIGHT = 2
MAX_TENANTS = 4096  # with a counter, besides those that wait


@dataclass(slots=True)
class Counter:
    """What one tenant has been served, in weighted tokens, and how many of its requests wait."""

    tenant: str
    served: int = 0
    num_waiting: int = 0

    def charge_prompt(self, num_tokens: int) -> None:
        self.served += PROMPT_WEIGHT * num_tokens

    def charge_output(self, num_tokens: int) -> None:
        self.served += OUTPUT_WEIGHT * num_tokens


class TokenCounters:
    """A bounded table of counters; a tenant that is not in it stands at the level of the last one served."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._waiting: dict[str, Counter] = {}
        self._last = Counter("")  # whose request was the last to stop waiting

    def __len__(self) -> int:
        return len(self._counters)

    def arrive(self, tenant: str) -> Counter:
        """Return the counter of a tenant of which a request has come; lift it if no other one waits."""
        counter = self._counters.get(tenant)
        if counter is None:
            counter = Counter(tenant)
            if len(self._counters) >= MAX_TENANTS + len(self._waiting):
                self._forget_some()
            self._counters[tenant] = counter
        if not counter.num_waiting:
            waiting = [other.served for other in self._waiting.values()]
            counter.served = max(counter.served, min(waiting, default=self._last.served))
        return counter

    def wait(self, counter: Counter) -> None:
        """Note that one more request of a tenant waits."""
        counter.num_waiting += 1
        self._waiting[counter.tenant] = counter

    def stop_waiting(self, counter: Counter) -> None:
        """Note that one request of a tenant waits no longer."""
        counter.num_waiting -= 1
        if not counter.num_waiting:
            del self._waiting[counter.tenant]

    def charge(self, counter: Counter, num_prompt_tokens: int) -> None:
        """Charge a request that is placed; what it is served from now on is charged to its counter."""
        counter.charge_prompt(num_prompt_tokens)
        self._last = counter

    def _forget_some(self) -> None:
        """Keep those that wait and, of the rest, the half with the largest counters: the others would be lifted."""
        rest = [counter for counter in self._counters.values() if not counter.num_waiting]
        rest.sort(key=lambda counter: counter.served, reverse=True)
        self._counters = {counter.tenant: counter for counter in (*self._waiting.values(), *rest[: MAX_TENANTS // 2])}
