"""What a response continues, and what is kept of it once it is complete."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pdserve.base.errors import echo
from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.openai.dialect import Json
from pdserve.router.frontend.responses.fields import CountInputRequest, ResponseRequest
from pdserve.router.frontend.responses.items import Item, dumped, stored
from pdserve.router.frontend.responses.response import ItemsResponse
from pdserve.router.frontend.responses.shelf import Entry, Holder, Kind, Shelf
from pdserve.router.frontend.responses.store import Store, not_kept
from pdserve.router.requests.timeline import Usage

_Asked = TypeVar("_Asked", bound=CountInputRequest)


async def context_of(store: Store, tenant: str, asked: CountInputRequest) -> list[Item]:
    """Return the items that a request continues; RefusedError names what is not there."""
    if asked.previous_response_id:
        kind, name, field = Kind.RESPONSE, asked.previous_response_id, "previous_response_id"
    elif asked.conversation_id:
        kind, name, field = Kind.CONVERSATION, asked.conversation_id, "conversation"
    else:
        return []
    holder = await store.get(tenant, name, kind, field)
    if holder.is_running:
        raise invalid(field, f"{name!r} is still being computed")
    check_room(store, holder, 0, field)
    return [Item.model_validate(item) for item in await store.history(tenant, name, kind, field)]


async def with_model(store: Store, tenant: str, asked: _Asked) -> _Asked:
    """Return a request that names its model: one that names none goes to the model of the response that it continues.

    It may name another one, as in OpenAI's API. RefusedError if that response is not there.
    """
    if asked.model or not asked.previous_response_id:
        return asked
    holder = await store.get(tenant, asked.previous_response_id, Kind.RESPONSE, "previous_response_id")
    return asked.model_copy(update={"model": holder.body["model"]})


async def session_of(store: Store, tenant: str, asked: ResponseRequest, own_id: str) -> str:
    """Return the name of the conversation that a response belongs to, where the client gives none; empty: none.

    It is the conversation's, or that of the response with which it began.
    """
    if asked.conversation_id:
        return asked.conversation_id
    if asked.previous_response_id:
        return await store.ask(Shelf.first, tenant, asked.previous_response_id)
    return own_id if asked.is_stored else ""


def check_room(store: Store, holder: Holder, num_bytes: int, field: str) -> None:
    """Raise RefusedError if a holder has no room for so many bytes more."""
    if holder.num_bytes + num_bytes > store.limits.max_bytes:
        limit = f"the limit of {store.limits.max_bytes} (max_stored_bytes)"
        raise invalid(field, f"its {holder.num_bytes + num_bytes} bytes are over {limit}")


async def given_in(store: Store, tenant: str, given: str | Sequence[Item] | None, field: str = "input") -> list[Item]:
    """Return a request's own items as they are kept, with what they refer to."""
    items, found, num_bytes = stored(given, field), dict[str, Item](), 0
    for place, item in enumerate(items):
        if not item.is_reference:
            continue
        name, where = item.id or "", f"{field}[{place}].id"
        if name in found:
            raise invalid(where, f"{echo(name, repr)} is referred to twice")
        kept = await store.ask(Shelf.item, tenant, name)
        if kept is None:
            raise not_kept(name, where)
        num_bytes += len(kept)
        if num_bytes > PUBLIC_MESSAGE_BYTES:
            raise invalid(where, f"the items that are referred to have more than {PUBLIC_MESSAGE_BYTES} bytes")
        items[place] = found[name] = Item.model_validate_json(kept)
    return items


class Keeping:
    """Keeps one response."""

    def __init__(
        self, store: Store, tenant: str, asked: ResponseRequest, given: Sequence[Item], response: ItemsResponse
    ) -> None:
        self.tenant = tenant
        self._store = store
        self._asked = asked
        self._given = dumped(given)
        self.response = response

    @property
    def entry(self) -> Entry:
        """The response as it is now."""
        response, asked = self.response, self._asked
        previous, conversation = asked.previous_response_id or "", asked.conversation_id
        return Entry(dict(response.told), self._given, response.output.items, previous, conversation)

    async def settle(self, usages: Sequence[Usage], ledger: Json | list[Json]) -> None:
        """Keep a response whose answer is complete. Raises RefusedError."""
        self.response.finish(usages, ledger)
        await self._store.ask(Shelf.put, self.tenant, Kind.RESPONSE, self.entry)

    async def begin(self, told: Json, running_s: float) -> None:
        """Keep a response that will be computed within that time, as it is `told` of."""
        await self._store.ask(Shelf.put, self.tenant, Kind.RESPONSE, replace(self.entry, body=told), running_s)

    async def go_on(self) -> None:
        await self._store.ask(Shelf.change, self.tenant, self.response.id, Kind.RESPONSE, _in_progress)

    async def end(self) -> None:
        """Keep the end of a response that was begun, unless it was cancelled or deleted."""
        await self._store.ask(Shelf.end, self.tenant, self.entry)


def _in_progress(found: Holder) -> Json:
    return found.body | ({"status": "in_progress"} if found.is_running else {})
