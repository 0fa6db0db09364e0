"""What the server answers it takes back: any answer with calls, and what tools say to them, is the next request."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import tool_templates
from http_door import StartHttp
from hypothesis import given, settings
from hypothesis import strategies as st
from router_fakes import MODEL, TOKENIZER
from written_answers import MODELS, TOOL, Json, Written, answers

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.dialect import CHAT, Choice, Prompt, Response, Shown
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.openai.filters import plan
from pdserve.router.frontend.openai.translate import chat_request
from pdserve.router.frontend.prompts import Prompts
from pdserve.router.frontend.served import ServedModel
from pdserve.text.tool_calls import FORMATS


def answered(written: Written, model: ServedModel, *, streams: bool) -> Json:
    """Return the message that a client has of an answer."""
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]})
    planned = plan(asked, inference.GenerateRequest(), model)
    assert planned.new_filter is not None
    choice = Choice(0, Prompt(), planned.new_filter())
    response = Response(CHAT, MODEL, TOKENIZER, Shown())
    if not streams:
        gain = Gain(0, [1], written.text, finish_reason=written.finish_reason)
        body = json.loads(response.body([(choice, gain)], {}, {}))
        message: Json = body["choices"][0]["message"]
        return message
    places = sorted({0, *written.cuts, len(written.text)})
    gains = [Gain(0, [1], written.text[a:b]) for a, b in pairwise(places)] or [Gain(0, [1])]
    gains[-1].finish_reason = written.finish_reason
    events = b"".join(response.chunks(choice, gain) for gain in gains).decode().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event]
    return put_together([chunk["choices"][0]["delta"] for chunk in chunks])


def put_together(deltas: list[Json]) -> Json:
    """Return the message of a stream, as clients put it together."""
    message: Json = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    for delta in deltas:
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for part in delta.get("tool_calls", ()):
            call = calls.setdefault(part["index"], part | {"function": {"name": "", "arguments": ""}})
            call["function"]["name"] += part["function"].get("name", "")
            call["function"]["arguments"] += part["function"].get("arguments", "")
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def sent_back(message: Json) -> ChatRequest:
    calls = message.get("tool_calls") or []
    said = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
    asked = {"role": "user", "content": "?"}
    again = [asked, message, *said, *([] if said else [asked])]
    return ChatRequest.model_validate_json(json.dumps({"messages": again, "tools": [TOOL]}))


def rendered(model: ServedModel, asked: ChatRequest) -> str:
    """Return the prompt; RefusedError where the server refuses the request."""

    async def ask() -> str:
        prompts = Prompts(model, 1, 10.0)
        try:
            return TOKENIZER.decode(list(await prompts.tokenize(chat_request(asked, {}), 100_000, 10.0)))
        finally:
            await prompts.close()

    return asyncio.run(ask())


@given(written=answers())
def test_a_stream_makes_the_message_that_the_body_has(written: Written) -> None:
    model = replace(MODELS["smollm2"], tool_format=FORMATS[written.format])
    body, stream = (answered(written, model, streams=streams) for streams in (False, True))
    for message in (body, stream):
        for call in message.get("tool_calls", ()):
            del call["id"]
    for call in stream.get("tool_calls", ()):
        del call["index"]
    assert stream == {name: value for name, value in body.items() if name != "refusal"}


@settings(max_examples=40, deadline=None)
@given(written=answers(), streams=st.booleans())
@pytest.mark.parametrize("name", tool_templates.ALL)
def test_any_answer_of_the_server_is_taken_back(name: str, written: Written, streams: bool) -> None:
    model = replace(MODELS[name], tool_format=FORMATS[written.format])
    message = answered(written, model, streams=streams)
    text = rendered(model, sent_back(message))
    if name in tool_templates.SHOWING and not (name in ("deepseek v3", "absent") and message["content"]):
        for call in message.get("tool_calls") or []:
            assert call["function"]["name"] in text
    assert "sunny" in text or not message.get("tool_calls")


@pytest.mark.parametrize("name", tool_templates.SHOWING)
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Bern"}', "Bern"),
        ("city: Bern", "city: Bern"),
        ("", "weather"),
        (None, "weather"),
        ("null", "weather"),
    ],
)
def test_arguments_are_shown_as_an_object_where_they_are_one_else_as_their_text(
    name: str, arguments: str | None, shown: str
) -> None:
    call = {"id": "a23456789", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    for message in ({"content": None}, {}, {"content": ""}):
        text = rendered(MODELS[name], sent_back({"role": "assistant", **message, "tool_calls": [call]}))
        assert shown in text
        assert "None" not in text
        assert "null" not in text


async def test_an_agents_second_turn_is_served(start_http: StartHttp) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "Bern, please"}}
    door = await start_http(template=tool_templates.SMOLLM2)
    for content in ({"content": None}, {}):
        body = {"messages": sent_back({"role": "assistant", **content, "tool_calls": [call]}).model_dump()["messages"]}
        answer = await door.post("/v1/chat/completions", **body, max_tokens=2, tools=[TOOL])
        assert answer.status_code == 200, answer.text


def test_a_conversation_with_tools_has_the_template_for_tools() -> None:
    model = replace(MODELS["smollm2"], tool_chat=MODELS["qwen2.5"].chat)
    with_tools, without = (
        sent_back({"role": "assistant", "content": "Hello"}),
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}]}),
    )
    assert '"name": "weather"' in rendered(model, with_tools)
    assert "SmolLM" in rendered(model, without)
    assert "SmolLM" in rendered(model, with_tools.model_copy(update={"tool_choice": "none"}))
