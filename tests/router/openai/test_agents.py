"""What agents say of their requests, by whichever names: their conversations, and hints of what comes."""

import asyncio
import re
from typing import Any

from http_door import HttpRouter, StartHttp
from router_fakes import MODEL, TOKENIZER, token_ids_of

CHAT, RESPONSES, MESSAGES, TEXT = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    TEXT: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    MESSAGES: {"model": MODEL, "messages": HELLO, "max_tokens": 2},
}
SERIES = re.compile(r'pdserve_conversation_turns_total\{outcome="(\w+)"\} (\d+)')


async def turns(door: HttpRouter) -> dict[str, int]:
    """Return the turns so far, by what became of their homes."""
    text = (await door.http.get("/metrics")).text
    return {outcome: int(count) for outcome, count in SERIES.findall(text) if int(count)}


async def sent(door: HttpRouter, path: str, headers: dict[str, str] | None = None, **fields: object) -> dict[str, Any]:
    response = await door.http.post(path, json=BODIES[path] | fields, headers=headers)
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    body: dict[str, Any] = response.json()
    return body


async def test_each_name_of_a_conversation_binds_its_turns(start_http: StartHttp) -> None:
    door, kept = await start_http(), 0
    ways: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        (CHAT, {}, {"session_id": "a"}),
        (TEXT, {}, {"session_id": "b"}),
        (CHAT, {}, {"prompt_cache_key": "c"}),
        (CHAT, {}, {"nvext": {"session_control": {"session_id": "d"}}}),
        (CHAT, {"x-session-id": "e"}, {}),
        (MESSAGES, {"x-claude-code-session-id": "f"}, {}),
        (MESSAGES, {}, {"metadata": {"user_id": "g"}}),
        (CHAT, {"x-user-id": "h"}, {}),
        (RESPONSES, {}, {"prompt_cache_key": "i"}),
        (RESPONSES, {"x-session-id": "j"}, {"store": False}),
    ]
    for path, headers, fields in ways:
        await sent(door, path, headers, **fields)
        await sent(door, path, headers, **fields)
        kept += 1
        assert await turns(door) == {"new": kept, "kept": kept}, (path, headers, fields)
    await sent(door, CHAT)
    assert await turns(door) == {"new": kept, "kept": kept}
    # The name of the closest meaning counts.
    await sent(door, CHAT, {"x-session-id": "e", "x-user-id": "new"}, prompt_cache_key="new")
    await sent(door, CHAT, {"x-session-id": "new"}, session_id="a")
    assert await turns(door) == {"new": kept, "kept": kept + 2}


async def test_kept_responses_and_conversations_are_conversations(start_http: StartHttp) -> None:
    door = await start_http()
    first = await sent(door, RESPONSES)
    second = await sent(door, RESPONSES, previous_response_id=first["id"])
    await sent(door, RESPONSES, previous_response_id=second["id"])
    await sent(door, RESPONSES, previous_response_id=first["id"])  # a branch
    assert await turns(door) == {"new": 1, "kept": 3}
    conversation = (await door.http.post("/v1/conversations", json={})).json()["id"]
    await sent(door, RESPONSES, conversation=conversation)
    await sent(door, RESPONSES, conversation={"id": conversation})
    assert await turns(door) == {"new": 2, "kept": 4}
    await sent(door, RESPONSES, store=False)
    assert await turns(door) == {"new": 2, "kept": 4}


async def test_hints_by_dynamos_names_and_by_ours_reach_the_router(start_http: StartHttp) -> None:
    door = await start_http()
    hints = {"priority": 7, "osl": 12}
    for path in (CHAT, RESPONSES, MESSAGES):
        await sent(door, path, nvext={"agent_hints": hints})
    await sent(door, CHAT, priority=-2, expected_output_tokens=3, nvext={"agent_hints": hints})
    await sent(door, CHAT, {"x-request-priority": "3"}, nvext={"agent_hints": {"osl": 5}})
    priorities = [each.spec.priority for each in door.router.workers["p0"].prefills]
    assert priorities == [7, 7, 7, -2, 3]


REFUSED: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    (CHAT, {}, {"session_id": "x" * 513}, "session_id"),
    (CHAT, {}, {"prompt_cache_key": "é" * 257}, "prompt_cache_key"),
    (RESPONSES, {}, {"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
    (CHAT, {"x-session-id": "x" * 513}, {}, "x-session-id"),
    (MESSAGES, {}, {"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
    (CHAT, {}, {"nvext": {"session_control": {}}}, "nvext.session_control.session_id"),
    (CHAT, {}, {"expected_output_tokens": 0}, "expected_output_tokens"),
    (CHAT, {}, {"nvext": {"agent_hints": {"osl": 0}}}, "nvext.agent_hints.osl"),
    (MESSAGES, {}, {"nvext": {"agent_hints": {"priority": 2**31}}}, "nvext.agent_hints.priority"),
    (CHAT, {}, {"nvext": {"backend_instance_id": 3}}, "nvext.backend_instance_id"),
    (CHAT, {}, {"nvext": {"dp_rank": 0}}, "nvext.dp_rank"),
    (RESPONSES, {}, {"nvext": {"greed_sampling": True}}, "nvext.greed_sampling"),
]


async def test_what_is_not_served_is_refused_by_its_name(start_http: StartHttp) -> None:
    door = await start_http()
    for path, headers, fields, named in REFUSED:
        response = await door.http.post(path, json=BODIES[path] | fields, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["refused_because"]) == (400, "invalid"), named
        assert error["message"].startswith(f"{named}: ")
        if path == MESSAGES:
            assert (response.json()["type"], error["type"]) == ("error", "invalid_request_error")
        else:
            assert error["param"] == named
    assert await turns(door) == {}


async def test_hints_without_effect_are_named_as_ignored(start_http: StartHttp) -> None:
    door = await start_http()
    given = {
        "agent_hints": {"latency_sensitivity": 2.0, "osl": 3},
        "session_control": {"session_id": "a", "action": "open", "timeout": 60},
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "use_raw_prompt": False,
    }
    response = await door.post(CHAT, **BODIES[CHAT], nvext=given)
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"].split(", ") == [
        *("nvext.cache_control", "nvext.use_raw_prompt", "nvext.agent_hints.latency_sensitivity"),
        *("nvext.session_control.action", "nvext.session_control.timeout"),
    ]


PREPARED = re.compile(r'pdserve_turns_prepared_total\{outcome="(\w+)"\} (\d+)')


async def prepared(door: HttpRouter, count: int) -> dict[str, int]:
    """Wait until so many preparations have ended; return how."""
    async with asyncio.timeout(20):
        while True:
            text = (await door.http.get("/metrics")).text
            ended = {outcome: int(number) for outcome, number in PREPARED.findall(text) if int(number)}
            if sum(ended.values()) >= count:
                return ended
            await asyncio.sleep(0.01)


async def test_what_is_known_of_the_next_turn_is_computed_at_the_lowest_priority(start_http: StartHttp) -> None:
    door = await start_http()
    hint = {"nvext": {"agent_hints": {"speculative_prefill": True}}}
    chat = await sent(door, CHAT, session_id="a", **hint)
    assert await prepared(door, 1) == {"done": 1}
    said = chat["choices"][0]["message"]["content"]
    text = await sent(door, TEXT, prepare_next_turn=True, return_token_ids=True)
    await prepared(door, 2)
    message = await sent(door, MESSAGES, **hint)
    await prepared(door, 3)
    response = await sent(door, RESPONSES, **hint)
    assert await prepared(door, 4) == {"done": 4}
    jobs = [(each.spec.priority, token_ids_of(each.spec)) for each in door.router.workers["p0"].prefills]
    begun = [TOKENIZER.decode(token_ids) for priority, token_ids in jobs if priority == -(2**31)]
    whole = f"user: hello\nassistant: {said}\nuser: "
    assert begun[0] == whole
    assert begun[1] == "hello" + text["choices"][0]["text"]
    assert begun[2:] == [whole, whole]
    assert message["content"][0]["text"] == response["output"][0]["content"][0]["text"] == said
    # Nobody waits for these: they are no requests of anybody's.
    metrics = (await door.http.get("/metrics")).text
    assert re.search(r"^pdserve_requests_arrived_total 4(\.0)?$", metrics, re.MULTILINE)
    assert await turns(door) == {"new": 2}
