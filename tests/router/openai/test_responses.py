"""OpenAI's Responses API, as its own client sees it."""

import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest
import tool_templates
from http_door import HttpRouter, StartHttp
from openai.types.responses import Response
from router_fakes import MODEL, TOKENIZER, tokens_of
from written_answers import Json

from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.responses import shelf
from pdserve.router.frontend.responses.fields import ResponseRequest
from pdserve.router.frontend.responses.items import Item, messages_of, stored

RESPONSES = "/v1/responses"
PROMPT = "user: hello\nassistant:"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def said(prompt: str, num_tokens: int) -> str:
    return TOKENIZER.decode(tokens_of(TOKENIZER.encode(prompt, add_special=False), num_tokens))


async def test_a_response_whole_and_streamed(start_http: StartHttp) -> None:
    door = await start_http()
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 6, "metadata": {"a": "b"}}
    whole = await door.client.responses.create(**asked)
    kinds, streamed = list[str](), list[Response]()
    async for event in await door.client.responses.create(**asked, stream=True):
        kinds.append(event.type)
        if event.type == "response.incomplete":
            streamed.append(event.response)
    num_prompt = len(TOKENIZER.encode(PROMPT, add_special=False))
    for response in (whole, *streamed):
        assert (response.status, response.model, response.metadata) == ("incomplete", MODEL, {"a": "b"})
        assert response.output_text == said(PROMPT, 6)
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        usage = response.usage
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (num_prompt, 6, num_prompt + 6)
        assert usage.input_tokens_details.cached_tokens == 1
        assert (response.model_extra or {})["pdserve"]["prefill_worker"] == "p0"
    assert list(dict.fromkeys(kinds)) == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ]
    counted = await door.client.responses.input_tokens.count(model=MODEL, input="hello")
    assert counted.input_tokens == num_prompt


async def test_a_response_is_retrieved_continued_and_deleted(start_http: StartHttp) -> None:
    door = await start_http()
    client = door.client.responses
    first = await client.create(model=MODEL, instructions="Be brief.", input="hello", max_output_tokens=4)
    assert first.output_text == said("system: Be brief.\nuser: hello\nassistant:", 4)
    assert (await client.retrieve(first.id)).to_dict() == first.to_dict()
    streamed = await client.create(
        model=MODEL, input="so?", previous_response_id=first.id, max_output_tokens=4, stream=True
    )
    last = [event async for event in streamed][-1]
    assert last.type == "response.incomplete"
    second = last.response
    history = f"user: hello\nassistant: {first.output_text}\nuser: so?\nassistant:"  # without the instructions
    assert (second.output_text, second.previous_response_id) == (said(history, 4), first.id)
    third = await client.create(
        model=MODEL, input=[{"role": "user", "content": "and?"}], previous_response_id=second.id, max_output_tokens=4
    )
    assert third.output_text == said(f"{history} {second.output_text}\nuser: and?\nassistant:", 4)
    (item,) = (await client.input_items.list(third.id)).data
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "and?"}]
    again = [{"type": "item_reference", "id": item.id}]
    assert (await client.create(model=MODEL, input=again, max_output_tokens=4)).output_text == said(
        "user: and?\nassistant:", 4
    )
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.id: .* is referred to twice"):
        await client.create(model=MODEL, input=again * 2, max_output_tokens=4)
    await client.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"previous_response_id: '{first.id}' is not kept here"):
        await client.create(model=MODEL, input="so?", previous_response_id=third.id)
    for gone in (client.retrieve(first.id), client.delete(first.id), client.input_items.list(first.id)):
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await gone


async def test_what_is_not_to_be_stored_is_not(start_http: StartHttp) -> None:
    door = await start_http()
    for stream in (False, True):
        made = await door.client.responses.create(
            model=MODEL, input="hello", max_output_tokens=2, store=False, stream=stream
        )
        name = made.id if isinstance(made, Response) else [event async for event in made][-1].response.id
        with pytest.raises(openai.NotFoundError):
            await door.client.responses.retrieve(name)


async def test_log_probabilities_come_with_the_text(start_http: StartHttp) -> None:
    door = await start_http()
    door.router.workers["p0"].logprobs_per_token = door.router.workers["d0"].logprobs_per_token = 2
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 5, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    whole = await door.client.responses.create(**asked)
    (part,) = whole.output[0].content  # type: ignore[union-attr]
    tokens = [entry.token for entry in part.logprobs or ()]  # type: ignore[union-attr]
    assert "".join(tokens) == whole.output_text
    assert len(tokens) == 5
    streamed, last = list[str](), None
    async for event in await door.client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            streamed += [entry.token for entry in event.logprobs]
        last = event
    assert last is not None
    assert last.response.output[0].content[0].to_dict() == part.to_dict()  # type: ignore[union-attr]
    assert streamed == tokens


def message(**part: object) -> list[Json]:
    return [{"role": "user", "content": [part]}]


REFUSED: list[tuple[Json, str | None, str]] = [
    ({"input": None}, "input", "it is empty"),
    ({"input": []}, "input", "it is empty"),
    ({"input": message(type="input_image", image_url="x")}, "input[0].content[0]", "a part of type 'input_image'"),
    ({"input": message(type="input_file", file_id="x")}, "input[0].content[0]", "a part of type 'input_file'"),
    ({"input": message(type="input_audio")}, "input[0].content[0]", "a part of type 'input_audio'"),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0].type", "'web_search_call' is not served"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "'tool' is not one of"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]},
        "input[0].call_id",
        "'c' is of no function_call",
    ),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input[0]", "a function_call has call_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' is not served: nothing is searched"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "'file_search' is not served"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type", "'code_interpreter' is not served: no code"),
    ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type", "'computer_use_preview' is not served"),
    ({"tools": [{"type": "mcp"}]}, "tools[0].type", "'mcp' is not served"),
    ({"tools": [{"type": "image_generation"}]}, "tools[0].type", "'image_generation' is not served"),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type", "'custom' is not served"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name", "'no spaces'; 1 to 64"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice", "tools of type 'mcp' are not served"),
    ({"tool_choice": "required"}, "tool_choice", "'required' goes with tools"),
    ({"truncation": "auto"}, "truncation", "'auto' is not served"),
    ({"prompt": {"id": "x"}}, "prompt", "no templates"),
    ({"include": ["everything"]}, "include[0]", "'everything' is not known"),
    ({"background": True, "store": False}, "background", "goes with store true"),
    ({"conversation": "c", "store": False}, "conversation", "goes with store true"),
    ({"conversation": "c", "previous_response_id": "r"}, "conversation", "goes against previous_response_id"),
    ({"stream_options": {}}, "stream_options", "they go with stream true"),
    ({"top_logprobs": 2, "tools": [WEATHER]}, "top_logprobs", "log probabilities go without tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'xml' is not one of"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
        "text.format.schema",
        "",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"metadata": {"a" * 65: "b"}}, None, ""),
]


async def test_what_this_api_does_not_serve_is_refused_by_its_field(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    for changes, param, said_of_it in REFUSED:
        response = await door.post(RESPONSES, **{"model": MODEL, "input": "hello", "max_output_tokens": 4} | changes)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), (changes, error)
        assert param is None or error["param"] == param, changes
        assert f": {said_of_it}" in error["message"], changes


async def test_fields_that_are_not_known_are_named(start_http: StartHttp) -> None:
    door = await start_http()
    response = await door.post(RESPONSES, input="hello", max_output_tokens=2, novel=1, text={"novel": 2}, user="u")
    assert response.headers["x-ignored-fields"] == "novel, text.novel"
    assert response.headers["x-request-id"]


def test_items_become_a_chat() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
    answer = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "18 C"}]}
    text = {"role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]}
    asked = ResponseRequest.model_validate(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "Celsius."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hot"}]},
                *(thought, text, call, call | {"call_id": "c2"}, answer, answer | {"call_id": "c2", "output": "19 C"}),
                {"role": "assistant", "content": "Mild."},
                {"role": "user", "content": "So?"},
            ],
            "tools": [{**WEATHER, "strict": True}],
            "tool_choice": {"type": "function", "name": "weather"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low"},
            "max_output_tokens": 9,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
        }
    )
    items = stored(asked.input)
    chat = asked.chat(items[:2], items[2:]).model_dump(exclude_none=True)
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Celsius."},
        {"role": "user", "content": "Hot"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
        {"role": "tool", "tool_call_id": "c2", "content": "19 C"},
        {"role": "assistant", "content": "Mild."},
        {"role": "user", "content": "So?"},
    ]
    weather = {"name": "weather", "parameters": WEATHER["parameters"], "strict": True}
    assert chat["tools"] == [{"type": "function", "function": weather}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ({"type": "function", "name": "weather"}, False)
    assert (chat["max_completion_tokens"], chat["reasoning_effort"]) == (9, "low")
    assert chat["chat_template_kwargs"] == {"enable_thinking": True}
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object"}},
    }


def test_each_thought_goes_with_what_follows_it() -> None:
    said = [{"role": "assistant", "content": text} for text in "ab"]
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in "xy"]
    messages = list(messages_of([], stored([Item(**each) for each in (thoughts[0], said[0], thoughts[1], said[1])])))  # type: ignore[arg-type]
    assert [(each["content"], each["reasoning_content"]) for each in messages] == [("a", "x"), ("b", "y")]


async def test_what_tools_say_is_the_next_request(start_http: StartHttp) -> None:
    door = await start_http(template=tool_templates.SMOLLM2)
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    items = [{"role": "user", "content": "?"}, call, {"type": "function_call_output", "call_id": "c1", "output": "sun"}]
    made = await door.client.responses.create(model=MODEL, input=items, tools=[WEATHER], max_output_tokens=2)  # type: ignore[arg-type]
    assert (made.tools[0].to_dict()["name"], made.tool_choice) == ("weather", "auto")


async def test_conversations_hold_what_was_said(start_http: StartHttp) -> None:
    door = await start_http()
    client = door.client.conversations
    hello: Any = [{"type": "message", "role": "user", "content": "hello"}]
    made = await client.create(items=hello, metadata={"a": "b"})
    assert (made.metadata, await client.retrieve(made.id)) == ({"a": "b"}, made)
    assert (await client.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    first = await door.client.responses.create(model=MODEL, input="so?", conversation=made.id, max_output_tokens=4)
    history = "user: hello\nuser: so?\nassistant:"
    assert first.output_text == said(history, 4)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    second = await door.client.responses.create(
        model=MODEL, input="and?", conversation={"id": made.id}, max_output_tokens=4
    )
    assert second.output_text == said(f"{history} {first.output_text}\nuser: and?\nassistant:", 4)
    listed = [item.to_dict() for item in (await client.items.list(made.id, order="asc", limit=100)).data]
    roles = [item["role"] for item in listed]
    assert roles == ["user", "user", "assistant", "user", "assistant"]
    page = await client.items.list(made.id, limit=2)
    assert [item.id for item in page.data] == [listed[4]["id"], listed[3]["id"]]
    assert page.has_more
    rest = await client.items.list(made.id, limit=3, after=page.last_id)
    assert [item.id for item in rest.data] == [item["id"] for item in reversed(listed[:3])]
    assert not rest.has_more
    added = await client.items.create(made.id, items=hello * 2)
    assert len(added.data) == 2
    assert (await client.items.retrieve(added.data[0].id, conversation_id=made.id)).id == added.data[0].id  # type: ignore[union-attr]
    await client.items.delete(added.data[0].id, conversation_id=made.id)  # type: ignore[union-attr,arg-type]
    with pytest.raises(openai.NotFoundError):
        await client.items.retrieve(added.data[0].id, conversation_id=made.id)  # type: ignore[union-attr,arg-type]
    assert (await client.delete(made.id)).deleted
    for gone in (client.retrieve(made.id), client.items.list(made.id), client.delete(made.id)):
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await gone
    with pytest.raises(openai.NotFoundError, match=f"conversation: '{made.id}'"):
        await door.client.responses.create(model=MODEL, input="?", conversation=made.id)
    assert (await door.client.responses.retrieve(first.id)).id == first.id


async def test_a_tenant_sees_his_own_alone(start_http: StartHttp, tmp_path: Path) -> None:
    keys = {tenant: new_key() for tenant in ("acme", "umbra")}
    file = tmp_path / "keys.yaml"
    entries = (f"{tenant}: {{keys: [{{id: web, sha256: {digest}}}]}}" for tenant, (_, digest) in keys.items())
    file.write_text(f"tenants: {{{', '.join(entries)}}}")
    file.chmod(0o600)
    door = await start_http(api_keys_file=file, key=keys["acme"][0])
    stranger = door.client.with_options(api_key=keys["umbra"][0])
    made = await door.client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    held = await door.client.conversations.create()
    (item,) = (await door.client.responses.input_items.list(made.id)).data
    reference: Any = [{"type": "item_reference", "id": item.id}]
    for peeking in (
        stranger.responses.retrieve(made.id),
        stranger.responses.delete(made.id),
        stranger.responses.cancel(made.id),
        stranger.responses.input_items.list(made.id),
        stranger.responses.create(model=MODEL, input="hello", previous_response_id=made.id),
        stranger.responses.create(model=MODEL, input="hello", conversation=held.id),
        stranger.responses.create(model=MODEL, input=reference),
        stranger.conversations.retrieve(held.id),
        stranger.conversations.delete(held.id),
        stranger.conversations.items.list(held.id),
        stranger.conversations.items.create(held.id, items=[{"role": "user", "content": "a", "type": "message"}]),
    ):
        with pytest.raises(openai.NotFoundError, match="is not kept here, or no more"):
            await peeking
    assert (await door.client.responses.retrieve(made.id)).id == made.id
    assert (await door.client.conversations.retrieve(held.id)).id == held.id


async def test_a_restart_with_a_file_keeps_conversations(start_http: StartHttp, tmp_path: Path) -> None:
    file = tmp_path / "responses.sqlite"
    before = await start_http(responses_file=file)
    made = await before.client.responses.create(model=MODEL, input="hello", max_output_tokens=4)
    held = await before.client.conversations.create(items=[{"type": "message", "role": "user", "content": "hello"}])
    await stop(before)
    assert file.stat().st_mode & 0o777 == 0o600
    after = await start_http(responses_file=file, router_id="another")
    history = f"{PROMPT} {made.output_text}\nuser: so?\nassistant:"
    asked: Any = {"model": MODEL, "input": "so?", "max_output_tokens": 4}
    continued = await after.client.responses.create(**asked, previous_response_id=made.id)
    assert continued.output_text == said(history, 4)
    answered = await after.client.responses.create(**asked, conversation=held.id)
    assert answered.output_text == said("user: hello\nuser: so?\nassistant:", 4)
    await stop(after)
    renamed = await start_http(responses_file=file, served_model_name="renamed", pair=False)
    for role in (link.ROLE_PREFILL, link.ROLE_DECODE):
        await renamed.router.worker(role, link.Role.Name(role), model="renamed")
    continued = await renamed.client.responses.create(input="so?", max_output_tokens=4, previous_response_id=made.id)
    assert (continued.model, continued.output_text) == ("renamed", said(history, 4))


async def stop(door: HttpRouter) -> None:
    """Let a router end before its test does."""
    await door.client.close()
    await door.http.aclose()
    door.router.stop.set()


async def test_a_stream_goes_on_where_its_worker_was_lost(start_http: StartHttp) -> None:
    door = await start_http()
    first = door.router.workers["d0"]
    first.max_step = 3
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 9, "stream": True}
    events, deltas = list[Any](), list[str]()
    async for event in await door.client.responses.create(**asked):
        events.append(event)
        deltas += [event.delta] if event.type == "response.output_text.delta" else []
        if len("".join(deltas)) == 4 and "d1" not in door.router.workers:
            await door.router.worker(link.ROLE_DECODE, "d1")
            await door.router.until_status(lambda status: sum(not w.unroutable for w in status.workers) == 3)
            await first.die()
    assert "".join(deltas) == events[-1].response.output_text == said(PROMPT, 9)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.model_extra["pdserve"]["attempts"] == 2


async def test_what_codex_sends_is_served(start_http: StartHttp) -> None:
    door = await start_http()
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None}
    asked = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}, thought],
        "tools": [{**WEATHER, "strict": False, "description": "Says how it is."}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "max_output_tokens": 3,
    }
    response = await door.post(RESPONSES, **asked)
    assert (response.status_code, response.headers.get("x-ignored-fields")) == (200, None)
    assert response.text.count("event: response.") >= 8
    assert "[DONE]" not in response.text


async def test_a_store_that_fails_fails_what_was_to_be_kept(
    start_http: StartHttp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "BUSY_S", 0.1)
    file = tmp_path / "responses.sqlite"
    door = await start_http(responses_file=file)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    asked: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 3}
    with pytest.raises(openai.InternalServerError, match="responses and conversations cannot be kept"):
        await door.client.responses.create(**asked)
    events = [event async for event in await door.client.responses.create(**asked, stream=True)]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert (await door.client.responses.create(**asked, store=False)).output_text == said(PROMPT, 3)
    other.execute("ROLLBACK")
    other.close()
    assert (await door.client.responses.create(**asked)).id


async def test_streams_and_refusals_have_this_apis_errors(start_http: StartHttp) -> None:
    door = await start_http(pair=False, max_num_held=0)
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        await door.client.responses.create(model="gpt-5", input="hello")
    with pytest.raises(openai.APIStatusError):
        await door.client.responses.create(model=MODEL, input="hello", stream=True)
    wrong = await door.http.get(RESPONSES)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    nothing = await door.http.get(f"{RESPONSES}/resp_1?stream=true")
    assert (nothing.status_code, nothing.json()["error"]["refused_because"]) == (404, "not_kept")
