"""Responses that are computed while no client waits."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest
from http_door import HttpRouter, StartHttp
from openai.types.responses import Response
from router_fakes import MODEL, PATIENCE_S, TOKENIZER, tokens_of

from pdserve.router.frontend.responses import background
from pdserve.router.frontend.responses.shelf import Entry, Kind, Limits, Shelf

ASKED: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 5, "background": True}


async def until_ended(client: openai.AsyncOpenAI, name: str) -> Response:
    async with asyncio.timeout(PATIENCE_S):
        while (found := await client.responses.retrieve(name)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


async def test_a_response_in_the_background_is_retrieved_and_continued(start_http: StartHttp) -> None:
    door = await start_http()
    held = await door.client.conversations.create()
    begun = await door.client.responses.create(**ASKED, conversation=held.id)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    ended = await until_ended(door.client, begun.id)
    said = TOKENIZER.decode(tokens_of(TOKENIZER.encode("user: hello\nassistant:", add_special=False), 5))
    assert (ended.status, ended.output_text, ended.id) == ("incomplete", said, begun.id)
    assert ended.usage is not None
    assert ended.usage.output_tokens == 5
    assert len((await door.client.conversations.items.list(held.id)).data) == 2
    assert (await door.client.responses.cancel(begun.id)).status == "incomplete"  # it has ended
    await door.client.responses.create(model=MODEL, input="?", previous_response_id=begun.id, max_output_tokens=1)


async def test_a_stream_from_the_background_is_read_again(start_http: StartHttp) -> None:
    door = await start_http()
    asked: Any = {**ASKED, "stream": True}
    async with await door.client.responses.create(**asked) as stream:
        first = [await anext(stream) for _ in range(3)]  # the client leaves, and the answer goes on
    assert [event.type for event in first] == ["response.created", "response.queued", "response.in_progress"]
    name = first[0].response.id  # type: ignore[union-attr]
    again = [event async for event in await door.client.responses.retrieve(name, stream=True, starting_after=1)]
    assert [event.sequence_number for event in again] == list(range(2, len(again) + 2))
    assert again[-1].type == "response.incomplete"
    whole = [event async for event in await door.client.responses.create(**asked)]
    assert [event.type for event in whole] == [event.type for event in (*first[:2], *again)]
    kept = await door.client.responses.retrieve(name)
    assert kept.to_dict() == again[-1].response.to_dict()
    async with await door.client.responses.retrieve(name, stream=True) as ended:
        assert len([event async for event in ended]) == len(whole)
    await door.client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        await door.client.responses.retrieve(name, stream=True)
    unstreamed = await door.client.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError, match="the events of this response are not kept here"):
        await door.client.responses.retrieve(unstreamed.id, stream=True)


async def test_an_answer_in_the_background_outlives_a_store_that_fails_for_a_while(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "RETRY_S", (0.01, 0.01))
    door, end, num_failed = await start_http(), Shelf.end, 0

    def fails(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    def ends_at_last(shelf: Shelf, tenant: str, entry: Entry) -> bool:
        nonlocal num_failed
        num_failed += 1
        return end(shelf, tenant, entry) if num_failed > 2 else bool(fails())

    monkeypatch.setattr(Shelf, "change", fails)
    monkeypatch.setattr(Shelf, "end", ends_at_last)
    events = [event async for event in await door.client.responses.create(**ASKED, stream=True)]
    assert (events[-1].type, num_failed) == ("response.incomplete", 3)
    kept = await door.client.responses.retrieve(events[0].response.id)  # type: ignore[union-attr]
    assert kept.to_dict() == events[-1].response.to_dict()  # type: ignore[union-attr]


async def test_a_cancelled_stream_from_the_background_ends(start_http: StartHttp) -> None:
    door = await start_http()
    for worker in door.router.workers.values():
        worker.is_paused = True
    async with await door.client.responses.create(**ASKED, stream=True) as stream:
        name = (await anext(stream)).response.id  # type: ignore[union-attr]
        await door.client.responses.cancel(name)
        last = [event async for event in stream][-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")  # type: ignore[union-attr]


async def test_a_response_in_the_background_is_cancelled_or_deleted(start_http: StartHttp) -> None:
    door = await start_http()
    for worker in door.router.workers.values():
        worker.is_paused = True
    first, second = [await door.client.responses.create(**ASKED) for _ in range(2)]
    with pytest.raises(openai.BadRequestError, match="is still being computed"):
        await door.client.responses.create(model=MODEL, input="?", previous_response_id=first.id)
    assert (await door.client.responses.cancel(first.id)).status == "cancelled"
    assert (await door.client.responses.retrieve(first.id)).status == "cancelled"
    await door.client.responses.delete(second.id)
    await door.router.until_idle()  # neither is computed any further
    foreground = await _foreground(door)
    with pytest.raises(openai.BadRequestError, match="was not begun in the background"):
        await door.client.responses.cancel(foreground)


async def _foreground(door: HttpRouter) -> str:
    for worker in door.router.workers.values():
        worker.is_paused = False
    return (await door.client.responses.create(model=MODEL, input="?", max_output_tokens=1)).id


async def test_their_number_is_bounded_and_what_is_not_valid_is_refused_at_once(start_http: StartHttp) -> None:
    door = await start_http(max_num_background=1)
    for worker in door.router.workers.values():
        worker.is_paused = True
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await door.client.responses.create(**ASKED, temperature=-1)
    begun = await door.client.responses.create(**ASKED)
    with pytest.raises(openai.RateLimitError) as refused:
        await door.client.responses.create(**ASKED)
    assert refused.value.response.json()["error"]["refused_because"] == "background"
    assert "pdserve_responses_in_background 1.0" in (await door.http.get("/metrics")).text
    await door.client.responses.cancel(begun.id)
    await door.router.until_idle()
    assert "pdserve_responses_in_background 0.0" in (await door.http.get("/metrics")).text
    again = await door.client.responses.create(**ASKED)
    await door.client.responses.cancel(again.id)


async def test_a_process_that_stops_leaves_no_response_without_an_end(start_http: StartHttp, tmp_path: Path) -> None:
    file = tmp_path / "responses.sqlite"
    door = await start_http(responses_file=file, drain_timeout_s=0.1)
    for worker in door.router.workers.values():
        worker.is_paused = True
    begun = await door.client.responses.create(**ASKED)
    shelf = Shelf(file, Limits(9, 1 << 24, 1e9), "test", lambda: 2e9)
    await door.client.close()
    await door.http.aclose()
    door.router.stop.set()
    async with asyncio.timeout(PATIENCE_S):
        while (found := shelf.get("", begun.id, Kind.RESPONSE)) is not None and found.is_running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert found is not None
    assert (found.body["status"], found.body["error"]["code"]) == ("failed", "server_error")
    assert not shelf.end("", Entry(found.body))
    shelf.close()
