"""What of a schema is not followed is named in a header of the answer, or refused by name."""

import json
from typing import Any

import httpx
from http_door import HttpRouter, StartHttp

HELLO: Any = [{"role": "user", "content": "hello"}]
FIELD = "response_format.json_schema.schema"
SECRET = {"type": "string", "format": "password"}
UNIQUE = {"type": "array", "items": {"type": "null"}, "uniqueItems": True}


async def ask(door: HttpRouter, schema: dict[str, Any], **more: Any) -> httpx.Response:  # noqa: ANN401
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return await door.post("/v1/chat/completions", messages=HELLO, max_tokens=1, response_format=asked, **more)


async def test_formats_that_are_not_followed_are_named_once(start_http: StartHttp) -> None:
    door = await start_http()
    schema = {"type": "object", "properties": {"a": SECRET, "b": SECRET, "c": {"type": "string", "format": "date"}}}
    for more in ({}, {"stream": True}, {"n": 2}):
        answer = await ask(door, schema, sparkle=1, **more)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == f"sparkle, {FIELD}.format=password"
    sent = json.loads(door.router.workers["p0"].prefills[0].spec.sampling.structured_output.json_schema)
    assert sent["properties"]["a"] == {"type": "string"}  # what workers compile
    assert sent["properties"]["c"] == {"type": "string", "format": "date"}
    several = {"prompt": ["a", "b"], "max_tokens": 1, "guided_json": SECRET}
    answer = await door.post("/v1/completions", **several)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "guided_json.format=password")


async def test_a_tools_parameters_are_rewritten_too(start_http: StartHttp) -> None:
    door = await start_http()
    parameters = {"type": "object", "properties": {"key": SECRET, "either": {"oneOf": [{"const": 1}, {"const": 2}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = await door.post("/v1/chat/completions", messages=HELLO, max_tokens=1, tools=tools, tool_choice="required")
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "tools.format=password"), answer.text


async def test_what_no_grammar_can_follow_is_refused_unless_schemas_are_lenient(start_http: StartHttp) -> None:
    door = await start_http()
    refused = await ask(door, {"type": "object", "properties": {"a": UNIQUE}})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, FIELD)
    assert error["message"] == f"{FIELD}: uniqueItems is not supported (at /properties/a)"
    assert "lenient" not in error["message"]  # a client cannot set that
    lenient = await start_http(lenient_schemas=True)
    answer = await ask(lenient, {"type": "object", "properties": {"a": UNIQUE, "b": SECRET}})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == f"{FIELD}.uniqueItems, {FIELD}.format=password"


async def test_a_format_is_shown_as_printable_text(start_http: StartHttp) -> None:
    door = await start_http()
    answer = await ask(door, {"type": "string", "format": "a\r\nb\u00e9"})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == f"'{FIELD}.format=a\\r\\nb\\xe9'"
