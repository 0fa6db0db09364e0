"""OpenAI's Responses API on a live cluster with two frontends that keep responses in one file; Anthropic's Messages."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from live_cluster import LiveCluster, all_ready, is_idle, live_cluster, load_of
from looking import PATIENCE_S, until
from pydantic import BaseModel, ConfigDict, Field

MODEL = "smollm2-135m-instruct"
DECODES = ("decode-0", "decode-1")
CAPITAL = "Name the capital of France."

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    flags = ("--served-model-name", MODEL, "--decode", "2", "--num-frontends", "2", "--dtype", "float32")
    with live_cluster(tmp_path_factory.mktemp("cluster"), smollm2, *flags) as cluster:
        yield cluster
        cluster.wait_for(is_idle, 30)


def connected(cluster: LiveCluster) -> openai.OpenAI:
    """Return a client with a connection of its own, which the kernel gives to either frontend."""
    return openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0, timeout=60)


class Weather(BaseModel):
    """A question for a forecast."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Rome"]


class Ship(BaseModel):
    name: str = Field(max_length=12)
    cannons: int = Field(ge=0, le=99)


WEATHER: Any = {"type": "function", "name": "weather", "strict": True, "parameters": Weather.model_json_schema()}


def test_answers_are_parsed_and_a_tool_is_called_and_answered(cluster: LiveCluster) -> None:
    with connected(cluster) as client:
        parsed = client.responses.parse(model=MODEL, input="Which ship?", text_format=Ship, max_output_tokens=200)
        assert isinstance(parsed.output_parsed, Ship)
        asked: Any = {"model": MODEL, "tools": [WEATHER], "max_output_tokens": 60, "temperature": 0}
        with client.responses.stream(
            input="How is Rome?", tool_choice="required", parallel_tool_calls=False, **asked
        ) as stream:
            kinds = [event.type for event in stream]
            called = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        call: Any = called.output[0]
        assert json.loads(call.arguments)["city"] in ("Bern", "Rome")
        said: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}]
        answer = client.responses.create(input=said, previous_response_id=called.id, **asked)
        assert answer.output
        sent: Any = [{"role": "user", "content": "How is Rome?"}, *called.output, *said]
        whole = client.responses.create(input=sent, store=False, **asked)
        assert whole.output_text == answer.output_text


def test_a_stream_goes_on_though_its_worker_is_killed(cluster: LiveCluster) -> None:
    asked: Any = {"model": MODEL, "input": "Tell a long story of the sea.", "max_output_tokens": 150, "temperature": 0}
    with connected(cluster) as client:
        whole = client.responses.create(**asked)
        with client.responses.create(**asked, stream=True) as stream:
            events = [next(stream) for _ in range(12)]
            kill_busiest(cluster)
            events += list(stream)
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ledger: Any = (events[-1].response.model_extra or {})["pdserve"]
    assert ledger["attempts"] > 1
    cluster.wait_for(all_ready(3), 60)


def test_a_stream_of_messages_goes_on_though_its_worker_is_killed(cluster: LiveCluster) -> None:
    said = [{"role": "user", "content": "Tell a long story of the sea."}]
    asked: Any = {"model": MODEL, "messages": said, "max_tokens": 150, "temperature": 0}
    with httpx.Client(base_url=cluster.state.http, timeout=60) as client:
        whole = client.post("/v1/messages", json=asked).json()
        with client.stream("POST", "/v1/messages", json={**asked, "stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            events = [json.loads(next(lines)[6:]) for _ in range(12)]
            kill_busiest(cluster)
            events += [json.loads(line[6:]) for line in lines]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
    *_, ending, stop = events
    assert (ending["delta"]["stop_reason"], stop) == (whole["stop_reason"], {"type": "message_stop"})
    assert ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert ending["pdserve"]["attempts"] > 1
    cluster.wait_for(all_ready(3), 60)


def kill_busiest(cluster: LiveCluster) -> None:
    """Kill the decode worker that runs the most sequences."""
    status = cluster.status()
    cluster.signal(max(DECODES, key=lambda name: load_of(status, name).num_running), signal.SIGKILL)


def test_frontends_share_what_is_kept_and_it_outlives_them(cluster: LiveCluster) -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    with connected(cluster) as client:
        first = client.responses.create(input=CAPITAL, **asked)
        held = client.conversations.create()
        client.responses.create(input=CAPITAL, conversation=held.id, **asked)
        ended = client.responses.create(model=MODEL, input=CAPITAL, background=True, max_output_tokens=2)
    for _ in range(6):
        with connected(cluster) as client:
            assert client.responses.retrieve(first.id).output_text == first.output_text
    until(lambda: retrieved(cluster, ended.id).status in ("completed", "incomplete"), PATIENCE_S)
    before = {name: cluster.pid_of(name) for name in ("frontend-0", "frontend-1")}
    for name in before:
        cluster.signal(name, signal.SIGKILL)
    until(lambda: all(cluster.state.pid_of(name) not in (None, pid) for name, pid in before.items()), PATIENCE_S)
    until(lambda: answers(cluster), PATIENCE_S)
    with connected(cluster) as client:
        again = client.responses.create(input="And of Italy?", previous_response_id=first.id, **asked)
        spoken = client.responses.create(input="And of Italy?", conversation=held.id, **asked)
        assert again.output_text == spoken.output_text
        assert len(client.conversations.items.list(held.id).data) == 4


def test_a_response_is_cancelled_through_another_frontend(cluster: LiveCluster) -> None:
    with connected(cluster) as client:
        begun = client.responses.create(model=MODEL, input="Count.", background=True, max_output_tokens=1500)
    for _ in range(6):
        with connected(cluster) as client:
            assert client.responses.cancel(begun.id).status == "cancelled"
    cluster.wait_for(is_idle, 30)


def retrieved(cluster: LiveCluster, name: str) -> Any:  # noqa: ANN401
    with connected(cluster) as client:
        return client.responses.retrieve(name)


def answers(cluster: LiveCluster) -> bool:
    """Return whether a frontend serves."""
    try:
        with connected(cluster) as client:
            return bool(client.responses.create(model=MODEL, input="?", max_output_tokens=1, store=False).id)
    except openai.APIError:
        return False
