"""The events of a response: their published order, and that they make what a whole response has."""

import json
import re
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from router_fakes import MODEL, TOKENIZER
from written_answers import MODELS, TOOL, Json, PlainText, Written, answers, plain_gains

from pdserve.base.errors import InvariantError
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import Cause, Refused
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.openai.dialect import Choice, Prompt
from pdserve.router.frontend.openai.fields import ChatRequest
from pdserve.router.frontend.openai.filters import plan
from pdserve.router.frontend.openai.generation import choices_of
from pdserve.router.frontend.responses.events import Output
from pdserve.router.frontend.responses.fields import ResponseRequest
from pdserve.router.frontend.responses.response import ItemsResponse
from pdserve.router.frontend.responses.response import written as as_written
from pdserve.router.frontend.served import ServedModel
from pdserve.router.requests.timeline import Usage
from pdserve.text.chat import ChatTemplate
from pdserve.text.reasoning import Reasoning, ReasoningTokens
from pdserve.text.tool_calls import FORMATS, FormatName

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LETTERS = {
    "response.created": "<",
    "response.queued": "q",
    "response.in_progress": "~",
    "response.output_item.added": "(",
    "response.content_part.added": "[",
    "response.output_text.delta": "t",
    "response.output_text.done": "T",
    "response.reasoning_text.delta": "r",
    "response.reasoning_text.done": "R",
    "response.function_call_arguments.delta": "a",
    "response.function_call_arguments.done": "A",
    "response.content_part.done": "]",
    "response.output_item.done": ")",
    "response.completed": ">",
    "response.incomplete": ">",
    "response.failed": ">",
}
ORDER = re.compile(r"<q?~(?:\((?:\[t*T\]|\[r*R\]|a*A)\))*>")
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"


def thinking(model: ServedModel, name: FormatName) -> ServedModel:
    reasoning = Reasoning(ChatTemplate(THINKING, {}))
    return ServedModel(
        MODEL,
        100_000,
        model.vocab_size,
        model.defaults,
        TOKENIZER,
        model.chat,
        tool_format=FORMATS[name],
        reasoning=reasoning,
    )


@st.composite
def thoughtful(draw: st.DrawFn) -> Written:
    """What models write that think before they answer, or not."""
    written = draw(answers())
    thought = draw(st.sampled_from(["", "<think>Hm.</think>\n", " <think>\n", "<think></think>", "<th"]))
    cuts = tuple(draw(st.lists(st.integers(0, len(thought + written.text)), max_size=6)))
    return Written(written.format, thought + written.text, written.finish_reason, cuts)


def begun(written: Written) -> tuple[ItemsResponse, Choice]:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}], "tools": [TOOL]})
    planned = plan(asked, inference.GenerateRequest(), thinking(MODELS["smollm2"], written.format))
    assert planned.begins_inside is not None
    counted = ReasoningTokens[Json](TOKENIZER.piece, begins_inside=planned.begins_inside)
    tools = [{"type": "function", **TOOL["function"]}]
    response = ItemsResponse(ResponseRequest(input="?", tools=tools), MODEL, TOKENIZER, counted)
    return response, choices_of(planned)[0]


def gains_of(written: Written) -> list[Gain]:
    places = sorted({0, *written.cuts, len(written.text)})
    texts = [written.text[a:b] for a, b in pairwise(places)] or [""]
    gains = [Gain(0, TOKENIZER.encode(text, add_special=False), text) for text in texts]
    gains[-1].finish_reason = written.finish_reason
    return gains


def parsed(data: bytes) -> list[Json]:
    """Return events; each is one that OpenAI's client knows."""
    events = []
    for event in data.decode().split("\n\n")[:-1]:
        name, _, told = event.partition("\ndata: ")
        events.append(json.loads(told))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    return events


def check(events: list[Json]) -> Json:
    """Return the last response; the events have the published order and belong together."""
    assert ORDER.fullmatch("".join(LETTERS[event["type"]] for event in events))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[Json] = []
    text = ""
    told = [event for event in events[:3] if "response" in event]
    for event in events[len(told) : -1]:
        if event["type"] == "response.output_item.added":
            items.append(event["item"])
            text = ""
            assert event["item"]["status"] == "in_progress"
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        assert event.get("content_index", 0) == 0
        text += event.get("delta", "")
        for name in {"text", "arguments"} & event.keys():
            assert event[name] == text
        if event["type"] == "response.content_part.done":
            assert event["part"]["text"] == text
        if event["type"] == "response.output_item.done":
            assert text == (
                event["item"].get("arguments") or "".join(p["text"] for p in event["item"].get("content", ()))
            )
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
    response: Json = events[-1]["response"]
    assert response["output"] == items
    assert events[-1]["type"] == f"response.{response['status']}"
    assert {event["response"]["id"] for event in (*told, events[-1])} == {response["id"]}
    return response


def without_names(response: Json) -> Json:
    """Return a response without what two of them never share."""
    items = [
        {name: each for name, each in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items}


@given(written=thoughtful(), waits=st.booleans())
def test_events_have_the_published_order_and_make_the_whole_response(written: Written, waits: bool) -> None:
    response, choice = begun(written)
    data = as_written(response.queued()) if waits else b""
    data += b"".join([response.chunks(choice, gain) for gain in gains_of(written)])
    data += response.last_chunk(choice, None) + response.end([Usage(3, 1, 0)], {})
    streamed = check(parsed(data))
    response, choice = begun(written)
    (gain,) = gains_of(Written(written.format, written.text, written.finish_reason, ()))
    whole = json.loads(response.body([(choice, gain)], [Usage(3, 1, 0)], {}))
    assert without_names(whole) == without_names(streamed)
    is_cut = written.finish_reason == inference.FINISH_REASON_LENGTH
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert (whole["incomplete_details"] is not None) is is_cut
    for place, item in enumerate(whole["output"], 1):
        is_whole = not (is_cut and place == len(whole["output"])) and is_object(item.get("arguments", "{}"))
        assert item["status"] == ("completed" if is_whole else "incomplete")


@given(texts=st.lists(st.text(), max_size=8))
def test_text_alone_is_written_as_any_other_delta_of_an_item(texts: list[str]) -> None:
    streams = set()
    for parser in (None, PlainText()):
        response, choice = (
            ItemsResponse(ResponseRequest(input="?"), MODEL, TOKENIZER, None, "resp_1"),
            Choice(0, Prompt(), parser),
        )
        response.told["created_at"] = 0
        data = b"".join([response.chunks(choice, gain) for gain in plain_gains(texts)])
        data += response.last_chunk(choice, None) + response.end([Usage(3, 1, 0)], {})
        assert check(parsed(data))["output"][0]["content"][0]["text"] == "".join(texts)
        data = re.sub(rb'"completed_at":\d+', b"", data)
        streams.add(re.sub(rb"msg_[0-9a-f]+", b"msg_1", data))
    assert len(streams) == 1


def is_object(text: str) -> bool:
    """Return whether the client's strict parser takes a call's arguments."""
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except msgspec.DecodeError:
        return False


@given(written=thoughtful(), num_gains=st.integers(0, 4))
def test_a_stream_that_fails_ends_each_item_that_has_begun(written: Written, num_gains: int) -> None:
    response, choice = begun(written)
    gains = [gain for gain in gains_of(written)[:num_gains] if not gain.finish_reason]
    data = b"".join([response.chunks(choice, gain) for gain in gains])
    events = parsed(data + response.refused(Refused(Cause.LOST_WORKERS, "workers were lost")))
    if not gains:
        assert [(each["type"], each["code"], each["sequence_number"]) for each in events] == [
            ("error", "unavailable", 0)
        ]
        return
    failed = check(events)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["error"]["message"] == "workers were lost"


def test_a_call_whose_arguments_are_no_object_is_incomplete() -> None:
    for arguments, status in (
        ('{"a": 1}', "completed"),
        ("", "completed"),
        ('{"a": ', "incomplete"),
        ("[1]", "incomplete"),
    ):
        output = Output()
        output.begin({})
        output.add({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]})
        output.close(is_cut=False)
        (item,) = output.items
        assert (item["arguments"], item["status"]) == (arguments, status)


def test_nothing_comes_before_the_beginning_or_after_the_end() -> None:
    output = Output()
    with pytest.raises(InvariantError):
        output.add({"content": "a"})
    with pytest.raises(InvariantError):
        output.end("completed", {})
    output.begin({})
    output.add({"content": "a"})
    with pytest.raises(InvariantError):
        output.end("completed", {})
    output.close(is_cut=False)
    output.end("completed", {})
    for late in (output.begin, output.error):
        with pytest.raises(InvariantError):
            late({}) if late == output.begin else output.error()
    with pytest.raises(InvariantError):
        output.add({"content": "a"})


@pytest.mark.parametrize(
    ("text", "begins_inside", "count", "rest"),
    [
        ("<think>Hm</think>So", False, len("<think>Hm</think>"), "So"),
        (" <think>Hm</think>So", False, len(" <think>Hm</think>"), "So"),
        ("Hm</think>So", True, len("Hm</think>"), "So"),
        ("<think>Hm", False, len("<think>Hm"), ""),
        ("\n So", False, 0, "\n So"),
        ("<th", False, 0, ""),
    ],
)
def test_tokens_of_reasoning_are_told_from_others(text: str, begins_inside: bool, count: int, rest: str) -> None:
    """Of a tokenizer with one token a byte."""
    ids = TOKENIZER.encode(text, add_special=False)
    for size in (1, 2, len(ids)):
        counted: ReasoningTokens[Any] = ReasoningTokens(TOKENIZER.piece, begins_inside=begins_inside)
        left = [each for place in range(0, len(ids), size) for each in counted.push(*[ids[place : place + size]] * 2)]
        assert (counted.count, TOKENIZER.decode(left)) == (count, rest)
