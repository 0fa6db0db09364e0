"""What a frontend has routers count: what tenants use of their limits, and how requests ended."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdserve.protocol.refusal import Refused, Status
from pdserve.router.frontend import channel as messages
from pdserve.router.frontend.clients import TenantLimits
from pdserve.router.requests.commands import Finished
from pdserve.router.requests.events import RequestArrived

if TYPE_CHECKING:
    from pdserve.router.frontend.routers import RouterLink, Routers

_LIMITS = set(TenantLimits.model_fields)


class HomeTenants:
    """The `Tenants` of a frontend: the home counts."""

    def __init__(self, routers: "Routers") -> None:
        self.begun: Counter[str] = Counter()  # requests under way, by tenant; none is 0
        self._routers = routers

    async def begin(self, tenant: str, limits: TenantLimits) -> Refused | None:
        own = limits.model_dump_json(include=_LIMITS)  # without the keys, which a tenant's entry in the file has
        while (home := await self._routers.wait_for_home()) is not None:
            number, reply = self._routers.new_reply(home)
            home.channel.post(messages.Begin(number, tenant, own.encode()))
            try:
                await asyncio.wait((reply,))
            except asyncio.CancelledError:
                reply.add_done_callback(partial(_give_back, home, tenant))
                raise
            if not reply.cancelled():  # else the router was lost
                refused = _refused(reply.result())
                if refused is None:
                    self.begun[tenant] += 1
                    if self._routers.home is not home:
                        self._routers.post(messages.Using(tenant, 1))
                return refused
        return self._routers.no_router()

    def spend(self, tenant: str, num_tokens: int) -> None:
        self._routers.post(messages.Spend(tenant, num_tokens))

    def end(self, tenant: str) -> None:
        self.begun[tenant] -= 1
        if not self.begun[tenant]:
            del self.begun[tenant]
        self._routers.post(messages.Done(tenant))

    def deny(self, reason: str) -> None:
        self._routers.post(messages.Deny(reason))


def _give_back(link: "RouterLink", tenant: str, reply: "asyncio.Future[bytes]") -> None:
    if not reply.cancelled() and _refused(reply.result()) is None:
        link.channel.post(messages.Done(tenant))


def _refused(reply: bytes) -> Refused | None:
    return msgspec.msgpack.decode(reply, type=Refused | None)


class HomeOutcomes:
    """The `Outcomes` of a frontend: routers count."""

    def __init__(self, routers: "Routers") -> None:
        self._routers = routers

    def reject(self, status: Status) -> None:
        self._routers.post(messages.Rejected(status))

    def end(self, event: RequestArrived, outcome: Finished | Refused, finish_reasons: Sequence[int]) -> None:
        link = self._routers.link_of(event.request_id)
        if link is not None:
            refused = outcome if isinstance(outcome, Refused) else None
            num_tokens = outcome.usage.completion_tokens if isinstance(outcome, Finished) else 0
            counted = messages.Counted(event.request_id, list(finish_reasons), num_tokens, refused)
            link.channel.post(counted)
