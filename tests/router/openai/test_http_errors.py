"""What clients of the HTTP door see of requests that are not served: OpenAI's shape, naming field, value and limit."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from http_door import StartHttp
from router_fakes import MODEL

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai import filters, generation, translate

HELLO: Any = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD = [
    (COMPLETIONS, {}, "prompt", "prompt: field required"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "prompt: "),
    (COMPLETIONS, {"prompt": ""}, "prompt", "prompt: it is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt: "),
    (
        COMPLETIONS,
        {"prompt": [True]},
        "prompt",
        "prompt: a text, token ids (integers below 2**32), or a list of either is needed",
    ),
    (
        COMPLETIONS,
        {"prompt": [2**32]},
        "prompt",
        "prompt: a text, token ids (integers below 2**32), or a list of either is needed",
    ),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "prompt: it is empty"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "prompt: 129 prompts are outside [1, 128]"),
    (COMPLETIONS, {"prompt": [1, 2, 999_999]}, "prompt", "token id 999999 at position 2"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias", "token: 999999 is outside"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "best_of: 3 is not n"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 1}, "best_of", "best_of: 1 is not n"),
    (COMPLETIONS, {"prompt": "a", "temperature": 1000}, "temperature", "temperature: 1000.0 is outside [0.0, 100.0]"),
    (COMPLETIONS, {"prompt": "a", "temperature": "warm"}, "temperature", "temperature: input should be a valid number"),
    (COMPLETIONS, {"prompt": "a", "n": 9}, "n", "n: input should be less than or equal to 8 (9)"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 8}, "n", "n: 800 choices of all prompts are over the limit of 256"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens: 0 is outside"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0 (-1)"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10_000}, "max_tokens", "maximum context length is 2048 tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "logprobs: 21 is outside [0, 20]"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, "stop", "17 stop strings are over the limit of 16"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search", "beam search is not supported"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, "stream_options", "they go with stream true"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "go with stream false"),
    (CHAT, {"messages": []}, "messages", "messages: it is empty"),
    (CHAT, {"messages": HELLO, "n": 2**31 - 1}, "n", "n: input should be less than or equal to 8 (2147483647)"),
    (CHAT, {"messages": "hello"}, "messages", "messages: input should be a valid array"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", "messages.0.role: field required"),
    (CHAT, {"messages": HELLO, "functions": [{}]}, "functions", "functions: use tools"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "goes with logprobs true"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "a field of its own"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "parts of type 'image_url' are not supported",
    ),
]


async def test_what_is_not_valid_names_its_field(start_http: StartHttp) -> None:
    door = await start_http()
    for path, body, param, text in BAD:
        response = await door.http.post(path, json=body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert text in error["message"], error
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert response.headers["x-request-id"]


async def test_whatever_is_too_long_has_the_words_and_the_code_by_which_clients_shorten_it(
    start_http: StartHttp,
) -> None:
    door = await start_http()
    long = "word " * 500  # within what is tokenized at once, and over 2048 tokens
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": long}),
        (COMPLETIONS, {"prompt": [1] * 2048}),
        (COMPLETIONS, {"prompt": [1] * 5000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10_000}),
        (COMPLETIONS, {"prompt": [1] * 2040, "min_tokens": 10}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 10_000, "stream": True}),
        ("/tokenize", {"prompt": long}),
        ("/detokenize", {"tokens": [1] * 5000}),
    ]
    for path, body in bodies:
        response = await door.http.post(path, json=body)
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert "this model's maximum context length is 2048 tokens" in error["message"], error  # LiteLLM's words
        assert error["code"] == "context_length_exceeded", error  # LangChain's
    with pytest.raises(openai.BadRequestError) as refused:
        await door.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": long}])
    assert "context_length_exceeded" in str(refused.value)
    other = await door.post(COMPLETIONS, prompt="a", model="maximum context length is 5 tokens (max_model_len)")
    assert other.json()["error"]["code"] == "model_not_found"


async def test_errors_of_requests_that_are_not_opened_have_their_headers(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    response = await door.post(COMPLETIONS, prompt=[999_999], request_id="mine", sparkle=True)
    assert response.status_code == 400
    assert (response.headers["x-request-id"], response.headers["x-ignored-fields"]) == ("mine", "sparkle")


async def test_what_prompts_share_is_checked_before_it_is_copied(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []

    def with_prompt(template: inference.GenerateRequest, prompt: str | Sequence[int]) -> inference.GenerateRequest:
        copied.append(prompt)
        return translate.with_prompt(template, prompt)

    monkeypatch.setattr(generation, "with_prompt", with_prompt)
    door = await start_http(pair=False)
    response = await door.post(COMPLETIONS, prompt=["a"] * 128, stop=["x"] * 17)
    assert response.status_code == 400
    assert copied == ["a"]


async def test_a_body_that_is_no_json_is_refused(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    for body in (b"", b"{", b"[]", b'{"prompt": "\\ud800"}', b"\xff", b"[" * 100_000):
        response = await door.http.post(COMPLETIONS, content=body, headers=JSON)
        assert response.status_code == 400, body[:20]
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content", [b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": 1'], ids=["bytes", "deep", "cut"]
)
async def test_a_body_that_cannot_be_parsed_is_a_wrong_body_on_every_path(
    start_http: StartHttp, path: str, content: bytes
) -> None:
    door = await start_http()
    response = await door.http.post(path, content=content, headers=JSON)
    error = response.json()["error"]
    assert (response.status_code, error["refused_because"]) == (400, "invalid"), error


async def test_openais_client_raises_its_own_kinds(start_http: StartHttp) -> None:
    door = await start_http()
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; 'tiny' is") as missing:
        await door.client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await door.client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await door.client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        await door.client.moderations.create(model=MODEL, input="x")


async def test_other_paths_and_methods_have_openais_shape(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    for method, path, status in (("GET", "/nothing", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/models", 405)):
        response = await door.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["code"] == ("not_found" if status == 404 else None)
    assert response.headers["allow"] == "GET"


async def test_a_text_with_half_a_surrogate_pair_is_not_valid(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}' if path == CHAT else b'{"prompt": "\\ud800"}'
        response = await door.http.post(path, content=body, headers=JSON)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error"), path


async def test_a_deadline_that_passes_is_not_tried_again(start_http: StartHttp) -> None:
    door = await start_http()
    door.router.workers["p0"].is_paused = True
    response = await door.post(COMPLETIONS, prompt="a", deadline_ms=50)
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"


async def test_an_error_after_the_first_token_is_an_event(start_http: StartHttp) -> None:
    door = await start_http()
    decode = door.router.workers["d0"]
    decode.max_step = 2
    stream = await door.client.completions.create(model=MODEL, prompt="hello", max_tokens=9, stream=True)
    text = ""
    while len(text) < 3:
        text += (await anext(stream)).choices[0].text
    request_id = decode.decodes[0].spec.request_id
    failed = link.Failed(request_id=request_id, attempt=0, code=link.FAILURE_CODE_INVALID, detail="too long")
    await decode.say(failed=failed)
    with pytest.raises(openai.APIError, match="too long") as caught:
        await anext(stream)
    assert caught.value.type == "server_error"


def key_with(limits: str, folder: Path) -> tuple[str, Path]:
    """Return an API key of the tenant acme, and the file that has it."""
    shown, digest = new_key()
    file = folder / "keys.yaml"
    file.write_text(f"tenants: {{acme: {{keys: [{{id: a, sha256: {digest}}}], {limits}}}}}\n")
    file.chmod(0o600)
    return shown, file


async def test_keys_are_asked_for_everywhere_but_at_the_probes(start_http: StartHttp, tmp_path: Path) -> None:
    shown, file = key_with("requests_per_s: 0.001, burst: 3", tmp_path)
    door = await start_http(api_keys_file=file, key=shown)
    for method, path in (
        ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/metrics"),
        ("GET", "/version"), ("GET", "/openapi.json"), ("GET", "/nothing"),
    ):  # fmt: skip
        for headers in ({}, {"authorization": "Bearer wrong"}):
            response = await door.http.request(method, path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready"):
        assert (await door.http.get(path)).status_code == 200
    await door.client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert door.router.workers["p0"].prefills[0].spec.cache_salt == "acme"
    with pytest.raises(openai.BadRequestError, match="tenant: 'other' is not the tenant of this API key"):
        await door.client.completions.create(model=MODEL, prompt="a", extra_body={"tenant": "other"})
    await door.client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as limited:
        await door.client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) > 100


async def test_openais_client_tries_again_when_a_refusal_allows_it(start_http: StartHttp, tmp_path: Path) -> None:
    shown, file = key_with("requests_per_s: 0.5, burst: 1", tmp_path)  # a slow machine, too, asks again within 2 s
    door = await start_http(api_keys_file=file, key=shown)
    patient = door.client.with_options(max_retries=2).completions.with_raw_response
    answers = [await patient.create(model=MODEL, prompt="a", max_tokens=1) for _ in range(2)]
    assert answers[1].retries_taken >= 1


async def test_tokenizing_counts_against_the_limits_of_its_tenant(start_http: StartHttp, tmp_path: Path) -> None:
    shown, file = key_with("max_concurrent: 1, tokens_per_s: 0.001", tmp_path)
    door = await start_http(pair=False, api_keys_file=file)
    door.http.headers["authorization"] = f"Bearer {shown}"
    for prompt, status in (("", 200), ("hello", 200), ("hello", 429)):
        assert (await door.post("/tokenize", prompt=prompt)).status_code == status
    refused = await door.post("/detokenize", tokens=[1])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_what_nobody_foresaw_has_openais_shape(start_http: StartHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await start_http(pair=False)

    def fail(*_: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(filters, "plan", fail)
    monkeypatch.setattr(Intake, "max_model_len", fail)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        response = await door.post(path, **body)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


async def test_a_compressed_body_is_refused_as_such(start_http: StartHttp) -> None:
    door = await start_http()
    body, headers = gzip.compress(b"{}"), {"content-encoding": "gzip", **JSON}
    response = await door.http.post(COMPLETIONS, content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (415, "invalid_request_error")
    assert error["message"] == "content-encoding: gzip is not read here; send the body as it is"
