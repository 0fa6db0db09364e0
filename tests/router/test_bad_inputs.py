"""Bad requests get a status and a message that names field, value and limit; the router stays."""

import math

import grpc
import pytest
from router_fakes import MODEL, StartRouter, collect, error_of, tokens_in

from pdserve.base.errors import MAX_ECHO_CHARS
from pdserve.net.rpc import MAX_STATUS_BYTES, PUBLIC_MESSAGE_BYTES
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link

Chat = inference.Chat
Message = inference.ChatMessage

BAD = {
    "no prompt": ({"text": None}, "prompt: none was given; exactly one of text, token_ids and chat is needed"),
    "empty text": ({"text": ""}, "text: it is empty, at least 1 character is needed"),
    "no ids": ({"token_ids": inference.TokenIds()}, "token_ids: it is empty, at least 1 id is needed"),
    "unknown id": ({"token_ids": inference.TokenIds(ids=[1, 256])}, "token_ids: token id 256 at position 1 is outside"),
    "too many ids": (
        {"token_ids": inference.TokenIds(ids=[1] * 2049)},
        "token_ids: 2049 ids are too many; this model's maximum context length is 2048 tokens",
    ),
    "too long": (
        {"text": "x" * 2040, "max_tokens": 9},
        "max_tokens: 2040 prompt tokens and max_tokens 9 are 2049 together; "
        "this model's maximum context length is 2048 tokens (max_model_len)",
    ),
    "n 0": ({"n": 0}, "n: 0 is outside [1, 8]"),
    "n 9": ({"n": 9}, "n: 9 is outside [1, 8]"),
    "logprobs": ({"logprobs": 21}, "logprobs: 21 is outside [0, 20]"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens: 0 is outside [1, "),
    "min_tokens": ({"min_tokens": 17}, "min_tokens: 17 is outside [0, 16]"),
    "temperature": ({"temperature": -0.5}, "temperature: -0.5 is outside [0.0, 100.0]"),
    "temperature NaN": ({"temperature": math.nan}, "temperature: nan is outside"),
    "temperature infinite": ({"temperature": math.inf}, "temperature: inf is outside"),
    "top_p 0": ({"top_p": 0.0}, "top_p: 0.0 is outside (0.0, 1.0]"),
    "top_k": ({"top_k": 257}, "top_k: 257 is outside [0, 256]"),
    "min_p": ({"min_p": 1.5}, "min_p: 1.5 is outside [0.0, 1.0]"),
    "repetition_penalty": ({"repetition_penalty": math.nan}, "repetition_penalty: nan is outside [0.01, 100.0]"),
    "presence_penalty": ({"presence_penalty": 2.5}, "presence_penalty: 2.5 is outside [-2.0, 2.0]"),
    "frequency_penalty": ({"frequency_penalty": -2.5}, "frequency_penalty: -2.5 is outside [-2.0, 2.0]"),
    "logit_bias token": ({"logit_bias": {256: 1.0}}, "logit_bias token: 256 is outside [0, 255]"),
    "logit_bias": ({"logit_bias": {1: math.nan}}, "logit_bias: nan is outside [-100.0, 100.0]"),
    "stop_token_ids": ({"stop_token_ids": [256]}, "stop_token_ids: 256 is outside [0, 255]"),
    "many stop ids": ({"stop_token_ids": [1] * 129}, "stop_token_ids entries: 129 is outside [0, 128]"),
    "allowed_token_ids": ({"allowed_token_ids": [256]}, "allowed_token_ids: 256 is outside [0, 255]"),
    "many allowed": ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids entries: 4097 is outside [0, 4096]"),
    "none allowed": (
        {"allowed_token_ids": [97], "bad_word_ids": [inference.TokenIds(ids=[97])]},
        "allowed_token_ids: bad words and stop tokens leave none of them to be sampled",
    ),
    "bad word of spaces": ({"bad_words": ["a", " "]}, "bad_words: ' ' has 1 bytes; 1 to 128, not all of them spaces"),
    "long bad word": ({"bad_words": ["x" * 129]}, "bad_words: '" + "x" * 63),
    "many bad words": ({"bad_words": ["x"] * 129}, "bad_words: 129 are over the limit of 128"),
    "bad word id": ({"bad_word_ids": [inference.TokenIds(ids=[1, 256])]}, "bad_word_ids: 256 is outside [0, 255]"),
    "no bad word": ({"bad_word_ids": [inference.TokenIds()]}, "bad_word_ids tokens: 0 is outside [1, 256]"),
    "many stops": ({"stop": ["x"] * 17}, "stop: 17 stop strings are over the limit of 16"),
    "long stop": ({"stop": ["x" * 129]}, "stop: 129 bytes at position 0 are outside [1, 128]"),
    "empty stop": ({"stop": ["a", ""]}, "stop: 0 bytes at position 1 are outside [1, 128]"),
    "tenant": ({"tenant": "x" * 65}, "tenant: 65 bytes are over the limit of 64"),
    "slo NaN": ({"slo": inference.Slo(ttft_ms=math.nan)}, "slo.ttft_ms: nan is not a number of milliseconds over 0"),
    "slo negative": ({"slo": inference.Slo(tpot_ms=-1)}, "slo.tpot_ms: -1.0 is not a number of milliseconds over 0"),
    "deadline 0": ({"deadline_ms": 0}, "deadline_ms: 0 is outside [1, 600000]"),
    "deadline": ({"deadline_ms": 600_001}, "deadline_ms: 600001 is outside [1, 600000]"),
    "no messages": ({"chat": Chat()}, "chat: 0 messages are outside [1, 4096]"),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD.keys())
async def test_a_bad_field_is_named_with_value_and_limit(
    start_router: StartRouter, fields: dict[str, object], message: str
) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    prompt = {} if {"token_ids", "chat"} & fields.keys() else {"text": "hello"}
    code, details = await error_of(router.generate(**(prompt | fields)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(message)
    assert prefill.prefills == [], "nothing was queued"


async def test_another_model_is_not_found(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    code, details = await error_of(router.generate(text="a", model="gpt-5"))
    assert (code, details) == (grpc.StatusCode.NOT_FOUND, "model: 'gpt-5' is not served here; 'tiny' is")
    await collect(router.generate(text="a", model=MODEL, max_tokens=1))


async def test_chat_needs_a_template(start_router: StartRouter) -> None:
    router = await start_router(template=None)
    await router.pair()
    code, details = await error_of(router.generate(chat=Chat(messages=[Message(role="user", content="hi")])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "chat: the model has no chat template; send text or token_ids"


@pytest.mark.parametrize("num_bytes", [PUBLIC_MESSAGE_BYTES, PUBLIC_MESSAGE_BYTES * 3])
async def test_a_message_over_the_limit_is_an_invalid_argument(start_router: StartRouter, num_bytes: int) -> None:
    router = await start_router()
    await router.pair()
    code, details = await error_of(router.generate(text="x" * num_bytes))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("message: ")
    assert details.endswith(f"are over the limit of {PUBLIC_MESSAGE_BYTES}")


async def test_bytes_that_are_no_message_are_an_invalid_argument(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    for method in ("Generate", "ListModels"):
        call = router.public.unary_stream(f"/pdserve.v1.InferenceService/{method}")(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_hostile_text_is_only_text(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    for text in ("\x00", "\u202e" * 50, "{{ 7 * 7 }}", "%s%n", "\ud7ff\U0010ffff"):
        message = Message(role="user", content=text)
        for prompt in ({"text": text}, {"chat": Chat(messages=[message])}):
            assert len(tokens_in(await collect(router.generate(max_tokens=2, **prompt)))) == 2


LONG = {"ascii": "x" * 20_000, "wide": "\U0001f600" * 5_000, "unprintable": "\U0010ffff" * 5_000}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
async def test_a_long_model_name_is_not_found_and_its_beginning_is_repeated(
    start_router: StartRouter, text: str
) -> None:
    router = await start_router()
    await router.pair()
    code, details = await error_of(router.generate(text="a", model=text))
    assert code is grpc.StatusCode.NOT_FOUND
    shown = repr(text)[:MAX_ECHO_CHARS]
    assert details == f"model: {shown}... ({len(text)} characters) is not served here; 'tiny' is"


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize("field", ["text", "stop", "tenant", "role", "content"])
async def test_long_text_in_any_field_ends_with_a_status_of_ours(
    start_router: StartRouter, field: str, text: str
) -> None:
    router = await start_router(template="{{ raise_exception(messages[0].role + messages[0].content) }}")
    await router.pair()
    fields: dict[str, object] = {"text": "a"}
    match field:
        case "text" | "tenant":
            fields[field] = text
        case "stop":
            fields["stop"] = [text]
        case _:
            fields = {"chat": Chat(messages=[Message(**{field: text})])}
    code, details = await error_of(router.generate(**fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert 0 < len(details) <= 10 * MAX_ECHO_CHARS


@pytest.mark.parametrize("text", LONG.values(), ids=LONG.keys())
async def test_a_workers_long_complaint_is_cut_before_it_is_a_status(start_router: StartRouter, text: str) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    prefill.is_paused = True
    call = router.generate(text="a")
    await prefill.until(lambda: len(prefill.prefills) == 1)
    request_id = prefill.prefills[0].spec.request_id
    await prefill.say(failed=link.Failed(request_id=request_id, code=link.FAILURE_CODE_INVALID, detail=text))
    code, details = await error_of(call)
    assert code is grpc.StatusCode.INTERNAL
    assert details.startswith(f"p0: INVALID: {text[:9]}")
    assert len(details.encode()) <= MAX_STATUS_BYTES
