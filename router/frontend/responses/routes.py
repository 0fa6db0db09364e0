"""Routes to what is kept: responses, conversations, and their items. Each tenant sees its own alone."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from pdserve.protocol.refusal import invalid
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


@dataclass(frozen=True, slots=True)
class _Caller:
    tenant: str
    store: Store
    background: Background


async def _identified(call: Request) -> _Caller:
    state = call.app.state
    return _Caller(state.clients.tenant(key_of(call.scope)), state.responses.store, state.responses.background)


Caller = Annotated[_Caller, Depends(_identified)]
routes = APIRouter()


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


@routes.get(RESPONSE)
async def retrieve_response(response_id: str, asked: Annotated[Retrieving, Query()], by: Caller) -> Response:
    """A response as it is now, or the events of one that was begun in the background with a stream."""
    found = await by.store.get(by.tenant, response_id, Kind.RESPONSE)
    if not asked.stream:
        return Response(msgspec.json.encode(found.body), media_type="application/json")
    log = by.background.log(by.tenant, response_id)
    if log is None:
        raise invalid("stream", "the events of this response are not kept here, or no more")
    first = 0 if asked.starting_after is None else asked.starting_after + 1
    headers = {name.decode(): shown.decode() for name, shown in EVENTS}
    return StreamingResponse(log.read(first), headers=headers)


@routes.delete(RESPONSE)
async def delete_response(response_id: str, by: Caller) -> Json:
    """Forget a response. If it is still being computed, it is cancelled."""
    if not await by.store.ask(Shelf.delete, by.tenant, response_id, Kind.RESPONSE):
        raise not_kept(response_id)
    by.background.cancel(by.tenant, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@routes.post(f"{RESPONSE}/cancel")
async def cancel_response(response_id: str, by: Caller) -> Json:
    """Cancel a response that is computed in the background; one that has ended stays as it is."""
    found = await by.store.ask(Shelf.cancel, by.tenant, response_id)
    if found is None:
        raise not_kept(response_id)
    if not found.body["background"]:
        raise invalid("id", "the response was not begun in the background")
    if found.body["status"] == "cancelled":
        by.background.cancel(by.tenant, response_id)
    return found.body


@routes.get(f"{RESPONSE}/input_items")
async def input_items(response_id: str, asked: Annotated[Listing, Query()], by: Caller) -> Json:
    """The items that a response's own request had."""
    await by.store.get(by.tenant, response_id, Kind.RESPONSE)
    return listed(await by.store.ask(Shelf.items, by.tenant, response_id), asked)


async def _held(by: _Caller, conversation_id: str) -> Holder:
    return await by.store.get(by.tenant, conversation_id, Kind.CONVERSATION)


async def _new_items(by: _Caller, given: Sequence[Item] | None) -> list[Json]:
    if len(given or ()) > MAX_NEW_ITEMS:
        raise invalid("items", f"{len(given or ())} are over the limit of {MAX_NEW_ITEMS}")
    return dumped(await given_in(by.store, by.tenant, given, "items"))


@routes.post(CONVERSATIONS)
async def create_conversation(body: NewConversation, by: Caller) -> Json:
    """Begin a conversation."""
    about: Json = {"id": f"conv_{secrets.token_hex(24)}", "object": "conversation"}
    about |= {"created_at": int(time.time()), "metadata": body.metadata or {}}
    entry = Entry(about, await _new_items(by, body.items))
    await by.store.ask(Shelf.put, by.tenant, Kind.CONVERSATION, entry)
    return about


@routes.get(CONVERSATION)
async def retrieve_conversation(conversation_id: str, by: Caller) -> Json:
    """A conversation, without its items."""
    return (await _held(by, conversation_id)).body


@routes.post(CONVERSATION)
async def update_conversation(conversation_id: str, body: NewMetadata, by: Caller) -> Json:
    """Replace a conversation's metadata."""

    def change(found: Holder) -> Json:
        return found.body | {"metadata": body.metadata or {}}

    changed = await by.store.ask(Shelf.change, by.tenant, conversation_id, Kind.CONVERSATION, change)
    if changed is None:
        raise not_kept(conversation_id)
    return changed


@routes.delete(CONVERSATION)
async def delete_conversation(conversation_id: str, by: Caller) -> Json:
    """Forget a conversation. Responses that it had are kept."""
    if not await by.store.ask(Shelf.delete, by.tenant, conversation_id, Kind.CONVERSATION):
        raise not_kept(conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@routes.get(ITEMS)
async def items(conversation_id: str, asked: Annotated[Listing, Query()], by: Caller) -> Json:
    """A conversation's items."""
    await _held(by, conversation_id)
    return listed(await by.store.ask(Shelf.items, by.tenant, conversation_id), asked)


@routes.post(ITEMS)
async def add_items(conversation_id: str, body: NewItems, by: Caller) -> Json:
    """Add items to a conversation."""
    holder = await _held(by, conversation_id)
    added = await _new_items(by, body.items)
    num_bytes = sum(len(msgspec.json.encode(item)) + ITEM_BYTES for item in added)
    check_room(by.store, holder, num_bytes, "items")
    if not await by.store.ask(Shelf.append, by.tenant, conversation_id, added):
        raise not_kept(conversation_id)
    return listed(added, Listing(limit=100, order="asc"))


@routes.get(ITEM)
async def item(conversation_id: str, item_id: str, by: Caller) -> Json:
    """One item of a conversation."""
    await _held(by, conversation_id)
    found = await by.store.ask(Shelf.item, by.tenant, item_id, conversation_id)
    if found is None:
        raise not_kept(item_id)
    item: Json = msgspec.json.decode(found)
    return item


@routes.delete(ITEM)
async def delete_item(conversation_id: str, item_id: str, by: Caller) -> Json:
    """Remove an item from a conversation; answers with the conversation."""
    left = await by.store.ask(Shelf.delete_item, by.tenant, conversation_id, item_id)
    if left is None:
        raise not_kept(item_id)
    return left
