"""What a browser's pages of other sites can do at a port without API keys: nothing, unless their origin is allowed."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_door import HttpRouter, StartHttp
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from router_fakes import MODEL

from pdserve.protocol.refusal import RefusedError
from pdserve.router.config import RouterConfig
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.openai.sites import Sites, check_json

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GUARDED = (
    "/",
    "/page/app.js",
    "/page/events",
    "/page/requests/11",
    "/v1/models",
    "/metrics",
    "/openapi.json",
    "/none",
)
OPEN = ("/health", "/ping", "/ready")
SITE = "https://chat.example"
# What openai's client for JavaScript 6.9 sends from a browser, in a preflight's spelling.
OPENAI_JS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)


def sites(**settings: Any) -> Sites:  # noqa: ANN401
    return Sites(RouterConfig.model_validate({"model": MODEL, "secret_file": "s", **settings}))


def asked(method: str = "GET", **headers: str) -> dict[str, Any]:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"method": method, "path": "/v1/models", "headers": raw}


def status_of(found: Sites, scope: Mapping[str, Any]) -> int:
    try:
        found.check_host(dict(scope))
        if scope["method"] == "POST":
            check_json(dict(scope))
    except RefusedError as error:
        return error.refused.response.http
    return 200


port = st.sampled_from(["", ":8000", ":1"])
loopback = st.one_of(
    st.sampled_from(["localhost", "LocalHost", "localhost.", "chat.localhost", "[::1]"]),
    st.ip_addresses(v=4, network="127.0.0.0/8").map(str),
)
foreign = st.one_of(
    st.sampled_from(
        [
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "0.0.0.0",
            "[::]",
            "",
            "::1",
        ]
    ),
    st.ip_addresses(v=4).filter(lambda address: not address.is_loopback).map(str),
    st.from_regex(r"[a-z][a-z0-9]{0,9}(\.[a-z]{2,8}){1,2}", fullmatch=True).filter(
        lambda name: "localhost" not in name
    ),
)


@given(loopback, port)
def test_names_of_loopback_are_served(host: str, number: str) -> None:
    assert status_of(sites(), asked(host=host + number)) == 200


@given(foreign, port)
def test_other_names_are_refused_without_keys_alone(host: str, number: str) -> None:
    assert status_of(sites(), asked(host=host + number)) == 403
    assert status_of(sites(api_keys_file="keys.yaml"), asked(host=host + number)) == 200
    name = host.strip("[]")
    if name and ":" not in name:
        assert status_of(sites(allowed_hosts=[name.upper()]), asked(host=host + number)) == 200


def test_each_host_header_counts() -> None:
    scope = asked(host="localhost")
    scope["headers"].append((b"host", b"evil.example"))
    assert status_of(sites(), scope) == 403
    assert status_of(sites(), asked()) == 403


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_may_be_posted(kind: str) -> None:
    assert status_of(sites(), asked("POST", host="localhost", content_type=kind)) == 200


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json", "", None],
)
async def test_what_a_page_may_post_to_any_site_is_refused_with_the_cure(
    start_http: StartHttp, kind: str | None
) -> None:
    door = await start_http()
    headers = {} if kind is None else {"content-type": kind}
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        answer = await door.http.post(path, content=json.dumps(CHAT), headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
        assert "-H 'content-type: application/json'" in answer.json()["error"]["message"]
    assert door.router.workers["p0"].prefills == []


async def test_a_foreign_host_reaches_nothing_but_health(start_http: StartHttp) -> None:
    door = await start_http()
    for path in GUARDED:
        answer = await door.http.get(path, headers={"host": "rebound.example:8000"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
    answer = await door.http.post("/v1/chat/completions", json=CHAT, headers={"host": "rebound.example"})
    assert answer.status_code == 403
    assert "'rebound.example'" in answer.json()["error"]["message"]
    for path in OPEN:
        assert (await door.http.get(path, headers={"host": "10.1.2.3:8000"})).status_code == 200
    assert door.router.workers["p0"].prefills == []


async def test_an_operator_names_hosts_of_a_proxy(start_http: StartHttp) -> None:
    door = await start_http(allowed_hosts=["llm.example"])
    answer = await door.http.post("/v1/chat/completions", json=CHAT, headers={"host": "llm.example"})
    assert answer.status_code == 200
    assert (await door.http.get("/v1/models", headers={"host": "other.example"})).status_code == 403


async def preflight(door: HttpRouter, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": OPENAI_JS,
        "access-control-request-private-network": "true",
    }
    return await door.http.options("/v1/chat/completions", headers=headers)


async def test_no_page_may_read_answers_by_default(start_http: StartHttp) -> None:
    door = await start_http()
    assert (await preflight(door, SITE)).status_code == 405
    answers = [
        await door.http.get("/v1/models", headers={"origin": SITE}),
        await door.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"origin": SITE}),
    ]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", [SITE, "*"])
async def test_pages_of_an_allowed_origin_use_the_api(start_http: StartHttp, allowed: str) -> None:
    door = await start_http(allowed_origins=[allowed])
    may = await preflight(door, SITE)
    assert (may.status_code, may.content) == (200, b"")
    assert may.headers["access-control-allow-origin"] == SITE
    assert may.headers["access-control-allow-headers"] == OPENAI_JS
    assert "POST" in may.headers["access-control-allow-methods"]
    assert may.headers["access-control-allow-private-network"] == "true"
    origin = {"origin": SITE}
    answers = [
        await door.http.get("/v1/models", headers=origin),
        await door.http.get("/page/app.js", headers=origin),
        await door.http.post("/v1/chat/completions", json=CHAT, headers=origin),
        await door.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=origin),
        await door.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 99}, headers=origin),
        await door.http.post("/v1/chat/completions", json={**CHAT, "model": "x", "stream": True}, headers=origin),
        await door.http.get("/none", headers=origin),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 400, 404, 404]
    for answer in answers:
        assert answer.headers.get_list("access-control-allow-origin") == [SITE]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"].lower() == "origin"


async def test_pages_of_another_origin_use_nothing(start_http: StartHttp) -> None:
    door = await start_http(allowed_origins=[SITE])
    for origin in ("https://evil.example", "http://chat.example", "null", SITE + ".evil.example"):
        assert (await preflight(door, origin)).status_code == 405
        answer = await door.http.get("/v1/models", headers={"origin": origin})
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "origin"


async def test_a_preflight_needs_no_key(start_http: StartHttp, tmp_path: Path) -> None:
    key, digest = new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"tenants": {"acme": {"keys": [{"id": "web", "sha256": digest}]}}}))
    keys.chmod(0o600)
    door = await start_http(allowed_origins=[SITE], api_keys_file=keys)
    assert (await preflight(door, SITE)).status_code == 200
    denied = await door.http.get("/v1/models", headers={"origin": SITE})
    assert (denied.status_code, denied.headers["access-control-allow-origin"]) == (401, SITE)
    headers = {"origin": SITE, "authorization": f"Bearer {key}", "host": "llm.example"}
    assert (await door.http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


@pytest.mark.parametrize("origin", ["chat.example", "https://", "https://a/b", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        sites(allowed_origins=[origin])


async def test_head_answers_as_get_without_a_body(start_http: StartHttp) -> None:
    door = await start_http()
    for path in ("/", "/page/app.js", "/page/events", "/health", "/ready", "/v1/models", f"/v1/models/{MODEL}",
                 "/version", "/metrics", "/openapi.json", "/tokenizer_info", "/none", "/v1/models/none",
                 "/v1/completions", "/tokenize"):  # fmt: skip
        async with asyncio.timeout(20):
            head = await door.http.head(path)
        assert head.content == b"", path
        async with door.http.stream("GET", path) as get:
            assert head.status_code == get.status_code, path
            assert (
                head.headers["content-type"] == get.headers["content-type"] if "content-type" in get.headers else True
            )
            if path not in ("/metrics", "/page/events"):  # whose content changes
                assert head.headers.get("content-length") == get.headers.get("content-length"), path
    again = await door.http.get("/health")  # the connection goes on
    assert again.status_code == 200
