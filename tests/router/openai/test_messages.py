"""Anthropic's Messages API, as its own client and a plain one see it."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from http_door import HttpRouter, StartHttp
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from router_fakes import MODEL, TOKENIZER, tokens_of
from written_answers import MODELS, TOOL, Json, PlainText, Written, answers, plain_gains

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import RefusedError
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.anthropic.fields import MessagesRequest
from pdserve.router.frontend.anthropic.response import MessagesResponse
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.openai.dialect import Choice, Prompt
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.openai.filters import plan
from pdserve.router.requests.timeline import Usage

if TYPE_CHECKING:  # it takes more than a second to import, in each process that collects tests
    import anthropic
    from anthropic.types import RawMessageStreamEvent

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant:"


@cache
def event_type() -> "TypeAdapter[RawMessageStreamEvent]":
    from anthropic.types import RawMessageStreamEvent  # noqa: PLC0415 - as below

    return TypeAdapter(RawMessageStreamEvent)


def client_of(door: HttpRouter, key: str = "none") -> "anthropic.AsyncAnthropic":
    import anthropic  # noqa: PLC0415 - it takes more than a second

    return anthropic.AsyncAnthropic(base_url=door.router.addresses.http, api_key=key, max_retries=0, timeout=20)


def said(prompt: str, num_tokens: int) -> str:
    return TOKENIZER.decode(tokens_of(TOKENIZER.encode(prompt, add_special=False), num_tokens))


async def test_a_message_whole_and_streamed(start_http: StartHttp) -> None:
    door = await start_http()
    async with client_of(door) as client:
        whole = await client.messages.create(model=MODEL, max_tokens=6, messages=HELLO)
        counted = await client.messages.count_tokens(model=MODEL, messages=HELLO)
        async with client.messages.stream(model=MODEL, max_tokens=6, messages=HELLO) as stream:
            kinds = [event.type async for event in stream if event.type != "text"]
            streamed = await stream.get_final_message()
    num_prompt = len(TOKENIZER.encode(PROMPT, add_special=False))
    for message in (whole, streamed):
        assert (message.role, message.model, message.type) == ("assistant", MODEL, "message")
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": said(PROMPT, 6)}]
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        usage = message.usage
        assert usage.cache_read_input_tokens == 1
        assert (usage.input_tokens, usage.output_tokens) == (num_prompt - 1, 6)
    assert counted.input_tokens == num_prompt
    assert list(dict.fromkeys(kinds)) == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


async def test_a_stop_sequence_ends_a_message_and_is_named(start_http: StartHttp) -> None:
    door = await start_http()
    stop = said(PROMPT, 6)[-2:]
    async with client_of(door) as client:
        message = await client.messages.create(model=MODEL, max_tokens=20, messages=HELLO, stop_sequences=[stop])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        text = message.content[0].to_dict()["text"]
        assert text == said(PROMPT, 20).partition(stop)[0]


async def test_a_message_may_be_shorter_than_max_tokens_where_the_model_has_no_more_room(start_http: StartHttp) -> None:
    door = await start_http(max_model_len=40)
    async with client_of(door) as client:
        message = await client.messages.create(model=MODEL, max_tokens=32_000, messages=HELLO)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens + len(TOKENIZER.encode(PROMPT, add_special=False)) == 40


async def test_a_key_is_shown_as_either_client_shows_it(start_http: StartHttp, tmp_path: Path) -> None:
    import anthropic  # noqa: PLC0415 - it takes more than a second

    key, digest = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"tenants: {{acme: {{keys: [{{id: web, sha256: {digest}}}]}}}}")
    file.chmod(0o600)
    door = await start_http(api_keys_file=file)
    async with client_of(door, key) as client, client_of(door, "wrong") as stranger:
        assert (await client.messages.create(model=MODEL, max_tokens=2, messages=HELLO)).content
        bearer = {"authorization": f"Bearer {key}", "x-api-key": ""}
        assert (await door.http.post(COUNT, json={"model": MODEL, "messages": HELLO}, headers=bearer)).is_success
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await stranger.messages.count_tokens(model=MODEL, messages=HELLO)
    assert refused.value.response.json()["error"]["type"] == "authentication_error"


def block(**members: object) -> list[Json]:
    return [{"role": "user", "content": [members]}]


@pytest.mark.parametrize(
    ("changes", "said_of_it"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: it is empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: "),
        ({"messages": block(type="image", source={})}, "messages[0].content[0]: a block of type 'image' is not served"),
        ({"messages": block(type="document", source={})}, "messages[0].content[0]: a block of type 'document'"),
        ({"messages": block(type="tool_use", id="a", name="b")}, "messages[0].content[0]: a block of type 'tool_use'"),
        (
            {"messages": block(type="tool_result", tool_use_id="a", content=[{"type": "image"}])},
            "messages[0].content[0].content[0]: a block of type 'image'",
        ),
        ({"system": [{"type": "image"}]}, "system[0]: a block of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: 'web_search_20250305'"),
        ({"tools": [{"name": "no spaces", "input_schema": {}}]}, "tools[0].name: 'no spaces'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: 'required' goes with tools"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: no tools are run here"),
        ({"container": "x"}, "container: no code is run here"),
        ({"temperature": -1}, "temperature: "),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
            "output_config.format.schema: ",
        ),
    ],
)
async def test_what_is_not_served_is_refused_in_the_shape_of_this_api(
    start_http: StartHttp, changes: Json, said_of_it: str
) -> None:
    door = await start_http(pair=False)
    body = {"model": MODEL, "max_tokens": 4, "messages": HELLO} | changes
    response = await door.post(MESSAGES, **body)
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told["error"]["message"].startswith(said_of_it)
    assert response.headers["request-id"]


async def test_other_refusals_have_the_types_that_clients_know(start_http: StartHttp) -> None:
    import anthropic  # noqa: PLC0415 - it takes more than a second

    door = await start_http(pair=False, max_num_held=0)
    body = {"model": MODEL, "max_tokens": 4, "messages": HELLO}
    old = await door.http.post(MESSAGES, json=body, headers={"anthropic-version": "2023-01-01"})
    assert old.json()["error"]["message"] == "anthropic-version: '2023-01-01' is not one of 2023-06-01, 2026-10-21"
    async with client_of(door) as client:
        with pytest.raises(anthropic.NotFoundError, match="'gpt-5' is not served here"):
            await client.messages.count_tokens(model="gpt-5", messages=HELLO)
        with pytest.raises(anthropic.APIStatusError):
            await client.messages.create(**body)
    wrong = await door.http.get(MESSAGES)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    called = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "Which tool?", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "18 C"}]}
    asked = MessagesRequest.model_validate(
        {
            "model": MODEL,
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hot"}, {"type": "text", "text": "there?"}]},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, called]},
                {"role": "user", "content": [result, result | {"is_error": True}, {"type": "text", "text": "So?"}]},
                {"role": "system", "content": [{"type": "text", "text": "Celsius."}]},
                {"role": "assistant", "content": "It is"},
            ],
            "tools": [{"name": "weather", "description": "now", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["END"],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
    )
    chat = asked.chat().model_dump(exclude_none=True)
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hot\nthere?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Which tool?",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "18 C"},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: 18 C"},
        {"role": "user", "content": "So?"},
        {"role": "system", "content": "Celsius."},
        {"role": "assistant", "content": "It is"},
    ]
    weather = {"name": "weather", "description": "now", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": weather}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert (chat["parallel_tool_calls"], chat["include_reasoning"], chat["stop"]) == (False, True, ["END"])
    assert (chat["max_tokens"], chat["continue_final_message"], chat["add_generation_prompt"]) == (9, True, False)
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert chat["reasoning_effort"] == "low"
    assert chat["chat_template_kwargs"] == {"enable_thinking": True}


@given(written=answers())
def test_events_make_the_message_that_a_whole_response_has(written: Written) -> None:
    """Each event is one that Anthropic's client knows; blocks come one after the other, and nothing after the end."""
    whole, (events, ended) = body_of(written), events_of(written)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    blocks: list[Json] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(blocks))
                is_open = True
                blocks.append(event["content_block"] | {"arguments": ""})
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] += delta["text"]
                else:
                    blocks[-1]["arguments"] += delta["partial_json"]
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(blocks) - 1)
                is_open = False
            case other:
                pytest.fail(other)
    assert not is_open
    put_together = [each for one in blocks if (each := finished(one)) is not None]
    for one in (*put_together, *whole["content"]):
        one.pop("id", None)
    assert put_together == whole["content"]
    assert ended == {name: whole[name] for name in ("stop_reason", "stop_sequence")}


def finished(one: Json) -> Json | None:
    """Return a block of a stream as a whole response has it; None for a call that was cut off."""
    arguments = one.pop("arguments")
    if one["type"] != "tool_use":
        return one
    try:
        value = msgspec.json.decode(arguments or "{}")  # as strict as the client's parser: no half of a surrogate pair
    except msgspec.DecodeError:
        return None
    return one | {"input": value} if isinstance(value, dict) else None


def begun(written: Written) -> tuple[MessagesResponse, Choice]:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]})
    planned = plan(asked, inference.GenerateRequest(), MODELS["smollm2"])
    assert planned.new_filter is not None
    return MessagesResponse(MODEL, 100_000), Choice(0, Prompt(), planned.new_filter())


def body_of(written: Written) -> Json:
    response, choice = begun(written)
    gain = Gain(0, [1], written.text, finish_reason=written.finish_reason)
    whole: Json = json.loads(response.body([(choice, gain)], [Usage(3, 1, 0)], {}))
    return whole


def events_of(written: Written) -> tuple[list[Json], Json]:
    """Return the events of a stream, and how it ended."""
    response, choice = begun(written)
    places = sorted({0, *written.cuts, len(written.text)})
    gains = [Gain(0, [1], written.text[a:b]) for a, b in pairwise(places)] or [Gain(0, [1])]
    gains[-1].finish_reason = written.finish_reason
    written_bytes = b"".join([response.chunks(choice, gain) for gain in gains])
    written_bytes += response.last_chunk(choice, None) + response.end([Usage(3, 1, 0)], {})
    events = []
    for event in written_bytes.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        event_type().validate_python(told)
        events.append(told)
    return events, events[-2]["delta"]


@given(texts=st.lists(st.text(), max_size=8))
def test_text_alone_is_written_as_any_other_delta(texts: list[str]) -> None:
    streams = set()
    for parser in (None, PlainText()):
        response, choice = MessagesResponse(MODEL, 100_000), Choice(0, Prompt(), parser)
        response.id = "msg_1"
        data = b"".join([response.chunks(choice, gain) for gain in plain_gains(texts)])
        streams.add(data + response.last_chunk(choice, None) + response.end([Usage(3, 1, 0)], {}))
    assert len(streams) == 1


def test_a_whole_conversation_that_ends_with_a_question_is_continued_by_nobody() -> None:
    asked = MessagesRequest.model_validate({"model": MODEL, "max_tokens": 1, "messages": HELLO})
    chat = asked.chat()
    assert (chat.continue_final_message, chat.add_generation_prompt, chat.include_reasoning) == (False, None, False)
    with pytest.raises(RefusedError, match="messages: it is empty"):
        asked.model_copy(update={"messages": []}).chat()
