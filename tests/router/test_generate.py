"""Answers, as clients of a real router see them."""

import grpc
import pytest
from router_fakes import (
    MODEL,
    TOKENIZER,
    StartRouter,
    collect,
    error_of,
    text_of,
    token_ids_of,
    token_of,
    tokens_in,
    tokens_of,
)

from pdserve.proto.v1 import inference_pb2 as inference


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


async def test_text_comes_back_with_usage_and_ledger(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    replies = await collect(router.generate(text="hello", max_tokens=6))
    expected = tokens_of(ids("hello"), 6)
    assert tokens_in(replies) == expected
    assert text_of(replies) == TOKENIZER.decode(expected)
    assert len({reply.request_id for reply in replies}) == 1
    last = replies[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (5, 6, 1)
    assert (last.ledger.prefill_worker, last.ledger.decode_worker, last.ledger.attempts) == ("p0", "d0", 1)
    assert (last.ledger.handoff_bytes, last.ledger.handoff_ms) == (4096, 1.5)
    at_ms = [step.at_ms for step in last.ledger.steps]
    assert at_ms == sorted(at_ms)
    assert {step.name: step.at_ms for step in last.ledger.steps}["first_token"] == last.ledger.ttft_ms


async def test_the_three_forms_of_a_prompt_reach_the_workers_as_token_ids(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    message = inference.ChatMessage(role="user", content="hi")
    await collect(router.generate(text="user: hi\nassistant:", max_tokens=2))
    await collect(router.generate(token_ids=inference.TokenIds(ids=ids("user: hi\nassistant:")), max_tokens=2))
    await collect(router.generate(chat=inference.Chat(messages=[message]), max_tokens=2))
    prompts = [list(token_ids_of(sent.spec)) for sent in prefill.prefills]
    assert prompts == [ids("user: hi\nassistant:")] * 3


async def test_workers_are_told_every_sampling_field(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    asked = {"temperature": 0.5, "logit_bias": {3: 1.5}, "tenant": "acme", "priority": 2}
    await collect(router.generate(text="a", timeout_s=None, **asked))
    spec = prefill.prefills[0].spec
    assert spec == decode.decodes[0].spec
    assert {field.name for field, _ in spec.sampling.ListFields()} >= {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "max_tokens", "min_tokens", "n", "logit_bias",
    }  # fmt: skip
    assert (spec.sampling.max_tokens, spec.sampling.temperature, spec.sampling.logit_bias[3]) == (16, 0.5, 1.5)
    assert (spec.cache_salt, spec.priority) == ("acme", 2)
    assert 590_000 < spec.deadline_ms <= 600_000
    assert (decode.decodes[0].source.worker_id, prefill.prefills[0].target.worker_id) == ("p0", "d0")


async def test_bad_words_reach_workers_with_a_space_before_them_and_without(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    given = inference.TokenIds(ids=[7, 8])
    await collect(router.generate(text="a", bad_words=["dog", " dog", "b"], bad_word_ids=[given]))
    sampling = prefill.prefills[0].spec.sampling
    assert [list(word.ids) for word in sampling.bad_word_ids] == [[7, 8], *map(ids, ("dog", " dog", "b", " b"))]


async def test_two_requests_without_a_seed_get_different_ones(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    for seed in ({}, {}, {"seed": 7}):
        await collect(router.generate(text="a", max_tokens=1, **seed))
    first, second, third = (sent.spec.sampling.seed for sent in prefill.prefills)
    assert first != second
    assert third == 7


async def test_several_continuations_come_apart_again(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    replies = await collect(router.generate(text="hello", max_tokens=5, n=3))
    for index in range(3):
        assert tokens_in(replies, index) == tokens_of(ids("hello"), 5, index)
    assert len(prefill.prefills) == 1
    assert replies[-1].usage.completion_tokens == 15


async def test_a_stop_string_across_tokens_ends_the_text_before_it(start_router: StartRouter) -> None:
    router = await start_router()
    _, decode = await router.pair()
    answer = TOKENIZER.decode(tokens_of(ids("hello"), 30))
    stop = answer[10:13]
    replies = await collect(router.generate(text="hello", max_tokens=30, stop=["absent", stop], n=2))
    before, _, _ = answer.partition(stop)
    assert text_of(replies) == before
    assert len(tokens_in(replies)) == len(before) + len(stop)
    (end,) = [delta for reply in replies for delta in reply.deltas if delta.index == 0 and delta.finish_reason]
    assert (end.finish_reason, end.stop_match) == (inference.FINISH_REASON_STOP, stop)
    assert tokens_in(replies, 1) == tokens_of(ids("hello"), 30, 1), "the other continuation goes on"
    await decode.until(lambda: any(list(cancel.indices) == [0] for cancel in decode.cancels))


async def test_a_stop_string_waits_for_min_tokens(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    expected = tokens_of(ids("hello"), 12)
    stop = TOKENIZER.decode(expected)[2]
    assert stop not in TOKENIZER.decode(expected[3:]), "the fake's answer has the stop string once"
    replies = await collect(router.generate(text="hello", max_tokens=12, min_tokens=5, stop=[stop]))
    assert tokens_in(replies) == expected


async def test_logprobs_pass_through(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    prefill.logprobs_per_token = decode.logprobs_per_token = 2
    replies = await collect(router.generate(text="a", max_tokens=3, logprobs=2))
    logprobs = [entry for reply in replies for delta in reply.deltas for entry in delta.logprobs]
    assert [(entry.chosen, len(entry.top)) for entry in logprobs] == [(-0.5, 2)] * 3
    replies = await collect(router.generate(text="a", max_tokens=3))
    assert not any(delta.logprobs for reply in replies for delta in reply.deltas)  # nobody asked for them


async def test_log_probabilities_of_the_prompt_come_before_the_first_token(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    replies = await collect(router.generate(text="hello", max_tokens=3, prompt_logprobs=2))
    scored = [entry for reply in replies for entry in reply.prompt_logprobs]
    assert [(entry.chosen, [top.token_id for top in entry.top]) for entry in scored] == [
        (-float(number), [0, 1]) for number in range(1, len(ids("hello")))
    ]
    first = next(place for place, reply in enumerate(replies) if tokens_in([reply]))
    assert not any(reply.prompt_logprobs for reply in replies[first + 1 :])


async def test_the_deadline_of_the_call_ends_the_request(start_router: StartRouter) -> None:
    router = await start_router()
    _, decode = await router.pair()
    decode.is_paused = True
    code, _ = await error_of(router.generate(text="hello", max_tokens=9, timeout_s=1.0))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert decode.decodes[0].spec.deadline_ms <= 1010  # gRPC tells three digits of it, rounded up
    await decode.until(lambda: len(decode.cancels) == 1)


async def test_a_slow_reader_is_cut_off_and_nobody_else_waits(start_router: StartRouter) -> None:
    router = await start_router(max_unsent_bytes=32768)
    prefill, decode = await router.pair()
    prefill.logprobs_per_token = decode.logprobs_per_token = 1024  # fills the connection's own buffers soon
    slow = router.generate(text="slow", max_tokens=1500, logprobs=0, timeout_s=None)
    await decode.until(lambda: any(cancel.request_id for cancel in decode.cancels))
    await router.until_idle()
    prefill.logprobs_per_token = decode.logprobs_per_token = 0
    replies = await collect(router.generate(text="quick", max_tokens=5))
    assert tokens_in(replies) == tokens_of(ids("quick"), 5)
    code, message = await error_of(slow)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert message == "client reads too slowly: 32768 bytes of its answer wait"


async def test_tokens_that_wait_for_the_client_come_in_one_reply(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    decode.is_paused = True
    call = router.generate(text="a", max_tokens=4)
    await decode.until(lambda: bool(decode.decodes))
    spec = decode.decodes[0].spec
    await call.read()
    deltas = [decode.delta(spec, 0, position, is_last=position == 3) for position in (1, 2, 3)]
    await decode.step(deltas)
    reply = await call.read()
    assert isinstance(reply, inference.GenerateResponse)
    assert list(reply.deltas[0].token_ids) == [token_of(ids("a"), 0, position) for position in (1, 2, 3)]
    assert reply.HasField("ledger")
    assert await call.read() is grpc.aio.EOF
    del prefill


async def test_the_models_are_listed(start_router: StartRouter) -> None:
    router = await start_router(template=None)
    await router.pair()
    reply = await router.inference.ListModels(inference.ListModelsRequest())
    assert [(m.name, m.max_model_len, m.vocab_size, m.has_chat_template) for m in reply.models] == [
        (MODEL, 2048, 256, False)
    ]


async def test_a_conversations_tools_documents_and_arguments_reach_the_template(start_router: StartRouter) -> None:
    template = (
        "{{ tools | tojson }}{{ documents[0].text }}{{ mood }}{% for m in messages %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}"
        "{{ m.name }}{{ m.reasoning_content }}{{ m.tool_call_id }}{{ m.content }}{% endfor %}"
    )
    router = await start_router(template=template)
    prefill, _ = await router.pair()
    call = '[{"function": {"name": "f", "arguments": "{\\"x\\": 7, \\"y\\": NaN}"}}]'
    chat = inference.Chat(
        messages=[
            inference.ChatMessage(role="assistant", tool_calls_json=call, reasoning_content="R"),
            inference.ChatMessage(role="tool", content="C", tool_call_id="I", name="N"),
            inference.ChatMessage(role="assistant", content="go "),
        ],
        tools_json='[{"a": 1}]',
        documents_json='[{"text": "D"}]',
        template_kwargs_json='{"mood": "M", "most": Infinity}',
        continue_final_message=True,
    )
    await collect(router.generate(chat=chat, max_tokens=1))
    assert list(token_ids_of(prefill.prefills[0].spec)) == ids('[{"a": 1}]DM7RNICgo ')


@pytest.mark.parametrize(
    ("chat", "complaint"),
    [
        ({"tools_json": "[1]"}, "tools: '[1]' is no JSON array of objects"),
        ({"documents_json": "{}"}, "documents: '{}' is no JSON array of objects"),
        ({"template_kwargs_json": "[]"}, "chat_template_kwargs: '[]' is no JSON object"),
        ({"template_kwargs_json": '{"a":' * 100_000}, "is no JSON: "),
        ({"tools_json": "nan"}, "tools: 'nan' is no JSON"),
    ],
)
async def test_json_that_is_none_names_its_field(
    start_router: StartRouter, chat: dict[str, str], complaint: str
) -> None:
    router = await start_router()
    await router.pair()
    message = inference.ChatMessage(role="user", content="hi")
    code, text = await error_of(router.generate(chat=inference.Chat(messages=[message], **chat)))  # type: ignore[arg-type]
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in text


@pytest.mark.parametrize(("label", "complaint"), [("x" * 129, "129 characters are over"), ("a\n", "printable ASCII")])
async def test_a_label_is_short_and_printable(start_router: StartRouter, label: str, complaint: str) -> None:
    router = await start_router()
    code, text = await error_of(router.generate(text="a", request_label=label))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert complaint in text


async def test_the_stop_string_stays_in_the_text_where_that_is_asked_for(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    whole = TOKENIZER.decode(tokens_of(ids("hello"), 8))
    stop = whole[3:5]
    end = whole.index(stop) + 2
    replies = await collect(router.generate(text="hello", max_tokens=8, stop=[stop], include_stop_str_in_output=True))
    assert text_of(replies) == whole[:end]
    replies = await collect(router.generate(text="hello", max_tokens=8, stop=[stop]))
    assert text_of(replies) == whole[: end - 2]
