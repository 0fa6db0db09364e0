"""Routes to what is kept: responses, conversations, and their items. Each tenant sees its own alone."""

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.openai.body import Body
from pdserve.router.frontend.openai.generation import key_of
from pdserve.router.frontend.responses.background import Background
from pdserve.router.frontend.responses.event_log import EVENTS
from pdserve.router.frontend.responses.events import Json
from pdserve.router.frontend.responses.fields import Metadata
from pdserve.router.frontend.responses.items import Item, dumped
from pdserve.router.frontend.responses.keeping import check_room, given_in
from pdserve.router.frontend.responses.shelf import ITEM_BYTES, Entry, Holder, Kind, Shelf
from pdserve.router.frontend.responses.store import Store, not_kept

MAX_NEW_ITEMS = 20  # of one call, as in OpenAI's API
RESPONSE = "/v1/responses/{response_id}"
CONVERSATIONS, CONVERSATION = "/v1/conversations", "/v1/conversations/{conversation_id}"
ITEMS, ITEM = f"{CONVERSATION}/items", f"{CONVERSATION}/items/{{item_id}}"


class NewConversation(Body):
    """POST /v1/conversations."""

    items: list[Item] | None = None
    metadata: Metadata | None = None


class NewMetadata(Body):
    """POST /v1/conversations/{id}."""

    metadata: Metadata | None = None


class NewItems(Body):
    """POST /v1/conversations/{id}/items."""

    items: list[Item]


class Listing(Body):
    """Which items a list has."""

    after: str | None = None
    limit: int = Query(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class Retrieving(Body):
    """How a response is shown."""

    stream: bool = False
    starting_after: int | None = Query(None, ge=0)


def listed(items: Sequence[Json], asked: Listing) -> Json:
    """Return a page of items, which stand in the order in which they came."""
    ordered = list(items) if asked.order == "asc" else list(reversed(items))
    if asked.after is not None:
        place = next((place for place, item in enumerate(ordered) if item["id"] == asked.after), None)
        if place is None:
            raise not_kept(asked.after, "after")
        ordered = ordered[place + 1 :]
    page = ordered[: asked.limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    return {"object": "list", "data": page, **ends, "has_more": len(ordered) > len(page)}


class KeptResponses:
    """Responses that were kept."""

    def __init__(self, clients: Clients, store: Store, background: Background) -> None:
        self._clients = clients
        self._store = store
        self._background = background

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route(RESPONSE, self.retrieve, methods=["GET"])
        router.add_api_route(RESPONSE, self.delete, methods=["DELETE"])
        router.add_api_route(f"{RESPONSE}/cancel", self.cancel, methods=["POST"])
        router.add_api_route(f"{RESPONSE}/input_items", self.input_items, methods=["GET"])
        return router

    async def retrieve(self, response_id: str, asked: Annotated[Retrieving, Query()], call: Request) -> Response:
        """A response as it is now, or the events of one that was begun in the background with a stream."""
        tenant = self._clients.tenant(key_of(call.scope))
        found = await self._store.get(tenant, response_id, Kind.RESPONSE)
        if not asked.stream:
            return Response(msgspec.json.encode(found.body), media_type="application/json")
        log = self._background.log(tenant, response_id)
        if log is None:
            raise invalid("stream", "the events of this response are not kept here, or no more")
        first = 0 if asked.starting_after is None else asked.starting_after + 1
        headers = {name.decode(): shown.decode() for name, shown in EVENTS}
        return StreamingResponse(log.read(first), headers=headers)

    async def delete(self, response_id: str, call: Request) -> Json:
        """Forget a response. If it is still being computed, it is cancelled."""
        tenant = self._clients.tenant(key_of(call.scope))
        if not await self._store.ask(Shelf.delete, tenant, response_id, Kind.RESPONSE):
            raise not_kept(response_id)
        self._background.cancel(tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, response_id: str, call: Request) -> Json:
        """Cancel a response that is computed in the background; one that has ended stays as it is."""
        tenant = self._clients.tenant(key_of(call.scope))
        found = await self._store.ask(Shelf.cancel, tenant, response_id)
        if found is None:
            raise not_kept(response_id)
        if not found.body["background"]:
            raise invalid("id", "the response was not begun in the background")
        if found.body["status"] == "cancelled":
            self._background.cancel(tenant, response_id)
        return found.body

    async def input_items(self, response_id: str, asked: Annotated[Listing, Query()], call: Request) -> Json:
        """The items that a response's own request had."""
        tenant = self._clients.tenant(key_of(call.scope))
        await self._store.get(tenant, response_id, Kind.RESPONSE)
        return listed(await self._store.ask(Shelf.items, tenant, response_id), asked)


class KeptConversations:
    """Conversations and their items."""

    def __init__(self, clients: Clients, store: Store) -> None:
        self._clients = clients
        self._store = store

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route(CONVERSATIONS, self.create, methods=["POST"])
        router.add_api_route(CONVERSATION, self.retrieve, methods=["GET"])
        router.add_api_route(CONVERSATION, self.update, methods=["POST"])
        router.add_api_route(CONVERSATION, self.delete, methods=["DELETE"])
        router.add_api_route(ITEMS, self.items, methods=["GET"])
        router.add_api_route(ITEMS, self.add_items, methods=["POST"])
        router.add_api_route(ITEM, self.item, methods=["GET"])
        router.add_api_route(ITEM, self.delete_item, methods=["DELETE"])
        return router

    async def create(self, body: NewConversation, call: Request) -> Json:
        """Begin a conversation."""
        tenant = self._clients.tenant(key_of(call.scope))
        about: Json = {"id": f"conv_{secrets.token_hex(24)}", "object": "conversation"}
        about |= {"created_at": int(time.time()), "metadata": body.metadata or {}}
        entry = Entry(about, await self._new_items(tenant, body.items))
        await self._store.ask(Shelf.put, tenant, Kind.CONVERSATION, entry)
        return about

    async def retrieve(self, conversation_id: str, call: Request) -> Json:
        """A conversation, without its items."""
        return (await self._held(conversation_id, call))[1].body

    async def update(self, conversation_id: str, body: NewMetadata, call: Request) -> Json:
        """Replace a conversation's metadata."""
        tenant, metadata = self._clients.tenant(key_of(call.scope)), body.metadata or {}

        def change(found: Holder) -> Json:
            return found.body | {"metadata": metadata}

        changed = await self._store.ask(Shelf.change, tenant, conversation_id, Kind.CONVERSATION, change)
        if changed is None:
            raise not_kept(conversation_id)
        return changed

    async def delete(self, conversation_id: str, call: Request) -> Json:
        """Forget a conversation. Responses that it had are kept."""
        tenant = self._clients.tenant(key_of(call.scope))
        if not await self._store.ask(Shelf.delete, tenant, conversation_id, Kind.CONVERSATION):
            raise not_kept(conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    async def items(self, conversation_id: str, asked: Annotated[Listing, Query()], call: Request) -> Json:
        """A conversation's items."""
        tenant, _ = await self._held(conversation_id, call)
        return listed(await self._store.ask(Shelf.items, tenant, conversation_id), asked)

    async def add_items(self, conversation_id: str, body: NewItems, call: Request) -> Json:
        """Add items to a conversation."""
        tenant, holder = await self._held(conversation_id, call)
        added = await self._new_items(tenant, body.items)
        num_bytes = sum(len(msgspec.json.encode(item)) + ITEM_BYTES for item in added)
        check_room(self._store, holder, num_bytes, "items")
        if not await self._store.ask(Shelf.append, tenant, conversation_id, added):
            raise not_kept(conversation_id)
        return listed(added, Listing(limit=100, order="asc"))

    async def item(self, conversation_id: str, item_id: str, call: Request) -> Json:
        """One item of a conversation."""
        tenant, _ = await self._held(conversation_id, call)
        found = await self._store.ask(Shelf.item, tenant, item_id, conversation_id)
        if found is None:
            raise not_kept(item_id)
        item: Json = msgspec.json.decode(found)
        return item

    async def delete_item(self, conversation_id: str, item_id: str, call: Request) -> Json:
        """Remove an item from a conversation; answers with the conversation."""
        left = await self._store.ask(
            Shelf.delete_item, self._clients.tenant(key_of(call.scope)), conversation_id, item_id
        )
        if left is None:
            raise not_kept(item_id)
        return left

    async def _held(self, conversation_id: str, call: Request) -> tuple[str, Holder]:
        """Return whose call it is, and the conversation."""
        tenant = self._clients.tenant(key_of(call.scope))
        return tenant, await self._store.get(tenant, conversation_id, Kind.CONVERSATION)

    async def _new_items(self, tenant: str, given: Sequence[Item] | None) -> list[Json]:
        if len(given or ()) > MAX_NEW_ITEMS:
            raise invalid("items", f"{len(given or ())} are over the limit of {MAX_NEW_ITEMS}")
        return dumped(await given_in(self._store, tenant, given, "items"))
