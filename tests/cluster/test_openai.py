"""OpenAI's own client against a live cluster with a real model."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from live_cluster import LiveCluster, is_idle, live_cluster

MODEL = "smollm2-135m-instruct"
CAPITAL: Any = [{"role": "user", "content": "Name the capital of France."}]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with live_cluster(folder, smollm2, "--served-model-name", MODEL) as cluster:
        yield cluster
        cluster.wait_for(is_idle, 20)


@pytest.fixture(scope="module")
def client(cluster: LiveCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_question_is_answered_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    asked: Any = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**asked)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra is not None
    ledger = chunks[-1].model_extra["pdserve"]
    assert (ledger["prefill_worker"], ledger["decode_worker"]) == ("prefill-0", "decode-0")
    assert ledger["handoff_bytes"] > 0


def test_logprobs_of_a_prompt_and_its_answer_agree(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "temperature": 0, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    answer = client.completions.create(prompt="The capital of France is", max_tokens=4, **asked).choices[0]
    assert answer.logprobs is not None
    ids = answer.model_extra or {}
    whole = ids["prompt_token_ids"] + ids["token_ids"]
    again = client.completions.create(prompt=whole, max_tokens=0, echo=True, **asked).choices[0]
    assert again.text == "The capital of France is" + answer.text
    assert again.logprobs is not None
    tokens, scored = again.logprobs.tokens or [], again.logprobs.token_logprobs or []
    assert tokens[-4:] == answer.logprobs.tokens
    assert scored[0] is None
    assert scored[-4:] == pytest.approx(answer.logprobs.token_logprobs, abs=0.05)
    assert "".join(tokens) == again.text
    offsets = again.logprobs.text_offset or []
    assert all(again.text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True))


def test_several_prompts_and_continuations_in_one_call(client: openai.OpenAI) -> None:
    prompts = ["One, two, three,", "Monday, Tuesday,"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=3, seed=1)
    single = [client.completions.create(model=MODEL, prompt=each, n=2, max_tokens=3, seed=1) for each in prompts]
    assert [choice.text for choice in answer.choices] == [choice.text for one in single for choice in one.choices]


def test_errors_are_the_clients_own(cluster: LiveCluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="gpt-4", messages=CAPITAL)
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=MODEL, messages=CAPITAL, max_tokens=100_000)
        assert (bad.value.param, bad.value.code) == ("max_tokens", "context_length_exceeded")


async def test_many_streams_at_once_and_those_that_leave(cluster: LiveCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0) as client:

        async def read(number: int) -> int:
            stream = await client.chat.completions.create(
                model=MODEL, messages=CAPITAL, max_tokens=24, stream=True, extra_body={"ignore_eos": True}
            )
            count = 0
            async for _ in stream:
                count += 1
                if number % 2 and count == 5:
                    await stream.close()
                    break
            return count

        counts = await asyncio.gather(*[read(number) for number in range(4)])
    assert counts[1::2] == [5, 5]
    assert min(counts[::2]) > 5
    with ThreadPoolExecutor(1) as pool:
        await asyncio.get_running_loop().run_in_executor(pool, cluster.wait_for, is_idle, 20)
