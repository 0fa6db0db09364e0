"""Answers that have to match a schema do, through hand-offs, moves and the loss of their workers."""

import json
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import moving
import openai
import pytest
from live_cluster import Answer, LiveCluster, all_ready, is_idle, live_cluster, load_of
from pydantic import BaseModel, Field
from twenty_schemas import SCHEMAS

from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference

DECODES = ("decode-0", "decode-1")
NUM_BEFORE = 4  # tokens that each answer has when something happens to it
TOPICS = ("a ship", "the weather", "my cousin", "a parcel", "the number of days")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    flags = ("--decode", "2", "--max-num-seqs", "32", "--speculative-config", '{"method": "ngram"}')
    with live_cluster(tmp_path_factory.mktemp("cluster"), smollm2, *flags) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def is_well(cluster: LiveCluster) -> Iterator[None]:
    yield
    cluster.wait_for(lambda status: all_ready(3)(status) and is_idle(status), 60)


def request_for(number: int) -> inference.GenerateRequest:
    """Return a request for an answer of one of the schemas; equal numbers give equal answers."""
    schema, topic = SCHEMAS[number % len(SCHEMAS)], TOPICS[number % len(TOPICS)]
    message = inference.ChatMessage(role="user", content=f"Write JSON about {topic}.")
    sampling = inference.SamplingParams(temperature=0.9, max_tokens=160, seed=number)
    sampling.structured_output.json_schema = json.dumps(schema)
    return inference.GenerateRequest(chat=inference.Chat(messages=[message]), sampling=sampling)


def check(number: int, answer: Answer) -> None:
    assert answer.finish[0] == inference.FINISH_REASON_STOP, answer.text[0]
    jsonschema.validate(json.loads(answer.text[0]), SCHEMAS[number % len(SCHEMAS)])


class Streams:
    """Answers under way, each some tokens long."""

    def __init__(self, cluster: LiveCluster, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self._pool = ThreadPoolExecutor(len(numbers))
        self._calls = [cluster.start(request_for(number)) for number in numbers]
        self.answers = list(self._pool.map(self._begin, self._calls))

    @staticmethod
    def _begin(call: grpc.Call) -> Answer:
        answer = Answer()
        while len(answer.tokens.get(0, [])) < NUM_BEFORE and 0 not in answer.finish:
            answer.add(next(call))
        return answer

    def end(self) -> list[Answer]:
        list(self._pool.map(Answer.read, self.answers, self._calls))
        self._pool.shutdown()
        for number, answer in zip(self.numbers, self.answers, strict=True):
            check(number, answer)
        return self.answers


def busiest(cluster: LiveCluster) -> str:
    status = cluster.status()
    return max(DECODES, key=lambda name: load_of(status, name).num_running)


def processes(status: admin.ClusterStatus) -> set[int]:
    """Return the incarnations of the attached workers."""
    return {worker.registration.incarnation for worker in status.workers}


def kill_one(cluster: LiveCluster, numbers: Sequence[int]) -> int:
    """Kill a decode worker under streams, and await its successor; return how many streams were placed again."""
    streams = Streams(cluster, numbers)
    victim, before = busiest(cluster), processes(cluster.status())
    cluster.signal(victim, signal.SIGKILL)
    num_replaced = sum(answer.ledger.attempts > 1 for answer in streams.end())
    cluster.wait_for(lambda status: all_ready(3)(status) and processes(status) != before, 60)
    return num_replaced


def move_all(cluster: LiveCluster, numbers: Sequence[int]) -> int:
    """Move streams from one decode worker to the other; return how many have moved."""
    streams = Streams(cluster, numbers)
    source = busiest(cluster)
    moving.move(cluster, source, *(set(DECODES) - {source}))
    return sum(bool(answer.ledger.moves) for answer in streams.end())


def test_answers_match_their_schemas_though_their_worker_is_killed_or_they_move(cluster: LiveCluster) -> None:
    num_killed, num_moved, first = 0, 0, 0
    while num_killed < 3:  # answers may end before their worker does
        num_killed, first = num_killed + kill_one(cluster, range(first, first + 20)), first + 20
    while num_moved < 3:  # or before they could move
        num_moved, first = num_moved + move_all(cluster, range(first, first + 20)), first + 20


class Ship(BaseModel):
    """What an answer is parsed to."""

    name: str = Field(max_length=12)
    cannons: int = Field(ge=0, le=99)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_openais_client_parses_answers_and_streams_tool_calls(cluster: LiveCluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        asked: Any = [{"role": "user", "content": "Which ship?"}]
        parsed = client.chat.completions.parse(model=model, messages=asked, response_format=Ship, max_tokens=200)
        assert isinstance(parsed.choices[0].message.parsed, Ship)
        stream = client.chat.completions.create(
            model=model, messages=asked, tools=[WEATHER], tool_choice="required", max_tokens=300, stream=True
        )
        names, arguments, reasons = [], "", []
        for chunk in stream:
            for choice in chunk.choices:
                reasons += [choice.finish_reason] if choice.finish_reason else []
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    names += [call.function.name] if call.function.name else []
                    arguments += (call.function.arguments or "") if len(names) == 1 else ""
        assert set(names) == {"weather"}
        assert json.loads(arguments)["city"] in ("Bern", "Rome")
        assert reasons == ["tool_calls"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model=model, messages=asked, extra_body={"structured_outputs": {"regex": "(a"}}
            )
        assert refused.value.param == "structured_outputs.regex"


REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)} | {"d1500": {"type": "string"}}
NASTY: list[tuple[str, Any]] = [  # as structured_outputs asks for them; none takes 64 KiB
    ("regex", "a{1000000}"),
    ("regex", r"(\w+\s?){1,500}[\p{Greek}&&\p{Lu}]"),
    ("json", {"type": "integer", "multipleOf": 999_983, "minimum": 0}),
    ("json", {"$ref": "#/$defs/d0", "$defs": REFERENCES}),
    ("json", {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(1500)}}),
    ("json", {"type": "object", "patternProperties": {"^a.*": {}, "^.*b": {}}}),
    ("json", {"$ref": "#"}),
    ("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'),
    ("grammar", "start: " + " | ".join(f"r{i}" for i in range(2500)) + "".join(f'\nr{i}: "{i}"' for i in range(2500))),
    ("grammar", "start: A\nA: /(a|b)*a(a|b){12}/ & /(a|b)*b(a|b){13}/ & ~/.*abab.*/"),
    ("choice", [str(number) for number in range(1025)]),
]


def test_what_is_nasty_is_refused_and_harms_no_stream(cluster: LiveCluster) -> None:
    plain = inference.SamplingParams(max_tokens=60, ignore_eos=True)
    asked = [inference.GenerateRequest(text=f"Once upon a time, {topic}", sampling=plain) for topic in TOPICS]
    streams = [(Answer(), cluster.start(request)) for request in asked]
    for answer, call in streams:
        answer.add(next(call))
    with (
        openai.OpenAI(base_url=f"{cluster.state.http}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(len(NASTY)) as pool,
    ):
        model = client.models.list().data[0].id

        def refusal(each: tuple[str, Any]) -> str | None:
            asking = {"structured_outputs": dict([each])}
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=model, prompt="Go:", max_tokens=8, extra_body=asking)
            return refused.value.param

        params = list(pool.map(refusal, NASTY))
    assert params == [f"structured_outputs.{field}" for field, _ in NASTY]
    for answer, call in streams:
        answer.read(call)
        assert len(answer.tokens[0]) == 60
