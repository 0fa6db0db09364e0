"""Chat and completions over HTTP, as OpenAI's client and a plain one see them."""

import asyncio
import json
import threading
from typing import Any

import openai
import pytest
from http_door import StartHttp
from router_fakes import MODEL, PATIENCE_S, TOKENIZER, token_ids_of, tokens_of

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.token_ids import TokenIds
from pdserve.router.frontend import prompts


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


def said(prompt: str, num_tokens: int, index: int = 0) -> str:
    return TOKENIZER.decode(tokens_of(ids(prompt), num_tokens, index))


HELLO: Any = [{"role": "user", "content": "hello"}]
PROMPT = "user: hello\nassistant:"


async def test_a_whole_answer(start_http: StartHttp) -> None:
    door = await start_http()
    raw = await door.client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=6)
    answer = raw.parse()
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.content == said(PROMPT, 6)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids(PROMPT)), 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    ledger = answer.model_extra["pdserve"] if answer.model_extra else {}
    assert (ledger["prefill_worker"], ledger["decode_worker"], ledger["attempts"]) == ("p0", "d0", 1)
    assert ledger["timings_ms"]["first_token"] == pytest.approx(ledger["ttft_ms"], abs=0.001)
    assert ledger["timings_ms"]["received"] == 0
    assert raw.headers["x-request-id"]


async def test_a_stream_has_role_content_finish_usage_and_done(start_http: StartHttp) -> None:
    door = await start_http()
    body = {"messages": HELLO, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    response = await door.post("/v1/chat/completions", **body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["transfer-encoding"] == "chunked"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == said(PROMPT, 6)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == len(ids(PROMPT)) + 6
    assert chunks[-1]["pdserve"]["decode_worker"] == "d0"


async def test_without_a_usage_chunk_the_last_one_has_the_ledger(start_http: StartHttp) -> None:
    door = await start_http()
    stream = await door.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True, n=2)
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == said(PROMPT, 3, index)
        assert own[-1].finish_reason == "length"
    shown = [chunk for chunk in chunks if chunk.model_extra and "pdserve" in chunk.model_extra]
    assert shown == chunks[-1:]


async def test_usage_of_every_chunk_grows(start_http: StartHttp) -> None:
    door = await start_http()
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = (await door.post("/v1/completions", prompt="hello", max_tokens=6, stream=True, stream_options=options)).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 6


async def test_completions_of_several_prompts_keep_their_order(start_http: StartHttp) -> None:
    door = await start_http()
    answer = await door.client.completions.create(model=MODEL, prompt=["hello", "abc"], max_tokens=4, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [said(prompt, 4, index) for prompt in ("hello", "abc") for index in (0, 1)]
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 16)
    stream = await door.client.completions.create(
        model=MODEL, prompt=[ids("hello"), ids("abc")], max_tokens=4, stream=True
    )
    streamed = {0: "", 1: ""}
    async for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {0: said("hello", 4), 1: said("abc", 4)}


async def test_a_stream_waits_for_prompts_that_are_still_tokenized(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_is_over, encode = threading.Event(), prompts.Prompts._encode_text

    def held(self: prompts.Prompts, request: inference.GenerateRequest) -> TokenIds:
        if request.text != "hello":
            assert first_is_over.wait(PATIENCE_S)
        return encode(self, request)

    monkeypatch.setattr(prompts.Prompts, "_encode_text", held)
    monkeypatch.setattr(prompts, "INLINE_BYTES", 100)
    door = await start_http()
    prefill, long = door.router.workers["p0"], "abc" * 40
    body = {"prompt": ["hello", long], "max_tokens": 1, "stream": True}
    asked = asyncio.create_task(door.post("/v1/completions", **body))
    await prefill.until(lambda: bool(prefill.prefills))
    await door.router.until_idle()
    first_is_over.set()
    events = (await asked).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    texts = ["".join(each["text"] for each in choices if each["index"] == index) for index in (0, 1)]
    assert texts == [said("hello", 1), said(long, 1)]


async def test_the_four_forms_of_a_prompt_are_the_same_tokens(start_http: StartHttp) -> None:
    door = await start_http()
    for prompt in ("hello", ["hello"], ids("hello"), [ids("hello")]):
        answer = await door.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)  # type: ignore[arg-type]
        assert answer.choices[0].text == said("hello", 1)
    prefills = door.router.workers["p0"].prefills
    assert [list(token_ids_of(sent.spec)) for sent in prefills] == [ids("hello")] * 4


async def test_echo_repeats_the_prompt(start_http: StartHttp) -> None:
    door = await start_http()
    for prompt in ("hello", ids("hello")):
        answer = await door.client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, echo=True)
        assert answer.choices[0].text == "hello" + said("hello", 3)
    answer = await door.client.completions.create(model=MODEL, prompt="hello", max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hello", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    stream = await door.client.completions.create(model=MODEL, prompt="hello", max_tokens=3, echo=True, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello" + said("hello", 3)


async def test_every_sampling_field_reaches_the_workers(start_http: StartHttp) -> None:
    door = await start_http()
    asked = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.25, "repetition_penalty": 1.5, "seed": -1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"3": 1.5}, "min_tokens": 1,
        "stop_token_ids": [7], "ignore_eos": True, "allowed_token_ids": [3, 4],
    }  # fmt: skip
    response = await door.post("/v1/completions", prompt="a", max_tokens=2, n=1, **asked, priority=2, tenant="acme")
    assert response.status_code == 200, response.text
    spec = door.router.workers["p0"].prefills[0].spec
    sampling = spec.sampling
    for name in ("temperature", "top_k", "min_p", "repetition_penalty", "presence_penalty", "min_tokens", "ignore_eos"):
        assert getattr(sampling, name) == asked[name], name
    assert sampling.seed == 2**64 - 1
    assert dict(sampling.logit_bias) == {3: 1.5}
    assert (list(sampling.stop_token_ids), list(sampling.allowed_token_ids)) == ([7], [3, 4])
    assert (spec.priority, spec.cache_salt) == (2, "acme")


async def test_max_tokens_has_the_defaults_that_openais_clients_expect(start_http: StartHttp) -> None:
    door = await start_http(max_model_len=64)
    prefills = door.router.workers["p0"].prefills
    await door.post("/v1/completions", prompt="hello")
    assert prefills[-1].spec.sampling.max_tokens == 16
    chat = await door.post("/v1/chat/completions", messages=HELLO)
    assert prefills[-1].spec.sampling.max_tokens == 64 - len(ids(PROMPT))
    assert chat.json()["usage"]["total_tokens"] == 64
    await door.post("/v1/chat/completions", messages=HELLO, max_tokens=9, max_completion_tokens=5)
    assert prefills[-1].spec.sampling.max_tokens == 5


async def test_logprobs_in_both_dialects(start_http: StartHttp) -> None:
    door = await start_http()
    for worker in door.router.workers.values():
        worker.logprobs_per_token = 2
    text = said(PROMPT, 2)
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    answer = (await door.post("/v1/chat/completions", **body)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(text)
    assert content[0]["bytes"] == [ord(text[0])]
    assert content[0]["logprob"] == -0.5
    assert [top["token"] for top in content[0]["top_logprobs"]] == [TOKENIZER.decode([0]), TOKENIZER.decode([1])]
    streamed = await door.client.chat.completions.create(model=MODEL, stream=True, **body)  # type: ignore[call-overload]
    parts = [chunk.choices[0].logprobs async for chunk in streamed]
    assert [each.token for part in parts if part for each in part.content] == list(text)
    answer = (await door.post("/v1/completions", prompt="hello", max_tokens=3, logprobs=2)).json()
    logprobs = answer["choices"][0]["logprobs"]
    text = said("hello", 3)
    assert logprobs["tokens"] == list(text)
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] == {TOKENIZER.decode([0]): -1.0, TOKENIZER.decode([1]): -1.0, text[0]: -0.5}


async def test_token_ids_are_shown_where_they_are_asked_for(start_http: StartHttp) -> None:
    door = await start_http()
    answer = (await door.post("/v1/completions", prompt="hello", max_tokens=3, return_token_ids=True)).json()
    assert answer["choices"][0]["token_ids"] == tokens_of(ids("hello"), 3)
    assert answer["choices"][0]["prompt_token_ids"] == ids("hello")
    chat = (await door.post("/v1/chat/completions", messages=HELLO, max_tokens=3, return_token_ids=True)).json()
    assert chat["prompt_token_ids"] == ids(PROMPT)
    assert chat["choices"][0]["token_ids"] == tokens_of(ids(PROMPT), 3)
    stream = await door.client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, stream=True, extra_body={"return_token_ids": True}
    )
    chunks = [chunk.model_dump() async for chunk in stream]
    assert chunks[0]["prompt_token_ids"] == ids(PROMPT)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == tokens_of(ids(PROMPT), 3)


async def test_a_stop_string_ends_the_text(start_http: StartHttp) -> None:
    door = await start_http()
    whole = said("hello", 8)
    stop = whole[3:5]
    answer = (await door.post("/v1/completions", prompt="hello", max_tokens=8, stop=stop)).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (
        whole[: whole.index(stop)],
        "stop",
        stop,
    )
    answer = (
        await door.post("/v1/completions", prompt="hello", max_tokens=8, stop=[stop], include_stop_str_in_output=True)
    ).json()["choices"][0]
    assert answer["text"] == whole[: whole.index(stop) + 2]


async def test_a_stop_token_that_ends_an_answer_is_named(start_http: StartHttp) -> None:
    door = await start_http()
    *before, stop = tokens_of(ids("hello"), 4)
    assert stop not in before
    asked = {"prompt": "hello", "max_tokens": 8, "stop_token_ids": [stop], "return_token_ids": True}
    answer = (await door.post("/v1/completions", **asked)).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (said("hello", 3), "stop", stop)
    assert answer["token_ids"] == [*before, stop]


async def test_objectives_and_priority_come_in_the_body_or_in_headers(start_http: StartHttp) -> None:
    door = await start_http()
    headers = {"x-slo-ttft-ms": "0.001", "x-request-priority": "3", "x-request-id": "mine"}
    response = await door.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert door.router.workers["p0"].prefills[0].spec.priority == 3
    assert response.headers["x-request-id"] == "mine"
    bad = await door.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-slo-ttft-ms": "soon"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-slo-ttft-ms")
    bad = await door.post("/v1/completions", prompt="a", slo={"tpot_ms": -1})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "slo.tpot_ms")


async def test_unknown_fields_are_accepted_and_named(start_http: StartHttp) -> None:
    door = await start_http()
    known = {"prompt": "a", "max_tokens": 1, "user": "me", "suffix": None}
    response = await door.post("/v1/completions", **known, colour="red", length_penalty=1.0)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "colour, length_penalty"
    assert "x-ignored-fields" not in (await door.post("/v1/completions", **known)).headers


async def test_a_refusal_of_an_assistant_is_part_of_the_conversation(start_http: StartHttp) -> None:
    door = await start_http()
    refusal = "I can not."
    spellings: list[dict[str, Any]] = [
        {"content": [{"type": "refusal", "refusal": refusal}]},
        {"content": None, "refusal": refusal},
        {"content": refusal, "refusal": None},
    ]
    for given in spellings:
        answer = await door.post(
            "/v1/chat/completions", messages=[*HELLO, {"role": "assistant", **given}, *HELLO], max_tokens=1
        )
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers
    prefills = door.router.workers["p0"].prefills
    prompts = {TOKENIZER.decode(token_ids_of(sent.spec)) for sent in prefills}
    assert prompts == {f"user: hello\nassistant: {refusal}\nuser: hello\nassistant:"}
    bad = await door.post("/v1/chat/completions", messages=[{"role": "user", **spellings[0]}])
    assert bad.status_code == 400


async def test_the_whole_template_is_reached(start_http: StartHttp) -> None:
    template = "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    door = await start_http(template=template)
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    await door.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
        max_tokens=1,
        tools=[{"type": "function", "function": {"name": "f"}}],
        extra_body={"chat_template_kwargs": {"mood": "M"}},
    )
    prompt = TOKENIZER.decode(token_ids_of(door.router.workers["p0"].prefills[0].spec))
    assert prompt == '[{"type": "function", "function": {"name": "f"}}]Mx\ny'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("settings", "status", "kind"),
    [({"max_num_held": 0}, 429, "rate_limit_error"), ({"pool_grace_s": 0}, 503, "overloaded_error")],
)
async def test_refusals_are_http_errors_even_of_streams(
    start_http: StartHttp, *, stream: bool, settings: dict[str, int], status: int, kind: str
) -> None:
    door = await start_http(pair=False, **settings)
    with pytest.raises(openai.APIStatusError) as refused:
        await door.client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
    assert refused.value.status_code == status
    assert refused.value.response.headers["x-should-retry"] == "true"
    assert int(refused.value.response.headers["retry-after-ms"]) > 0
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert refused.value.type == kind


async def test_an_answer_may_begin_with_the_assistants_message_that_it_goes_on_with(start_http: StartHttp) -> None:
    door = await start_http()
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "Once upon "}]
    asked = {"messages": begun, "max_tokens": 3, "add_generation_prompt": False, "logprobs": True, "echo": True}
    whole = (await door.post("/v1/chat/completions", **asked)).json()["choices"][0]
    plain = (await door.post("/v1/chat/completions", **{**asked, "echo": False})).json()["choices"][0]
    assert whole["message"]["content"] == "Once upon " + plain["message"]["content"]
    assert whole["logprobs"] == plain["logprobs"]
    more = {"add_generation_prompt": False, "echo": True}
    stream = await door.client.chat.completions.create(
        model=MODEL, messages=begun, max_tokens=3, stream=True, extra_body=more
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == whole["message"]["content"]
    of_users = (await door.post("/v1/chat/completions", messages=HELLO, max_tokens=3, echo=True)).json()["choices"][0]
    assert not of_users["message"]["content"].startswith("hello")
