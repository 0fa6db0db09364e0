"""POST /v1/embeddings against a real router whose workers are fakes."""

import asyncio
import base64
import struct
from collections.abc import Iterable, Sequence
from math import hypot
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from http_door import HttpRouter, StartHttp
from router_fakes import MODEL, TOKENIZER, FakeWorker, collect, error_of, vector_of
from starlette.types import Send

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.openai import embeddings
from pdserve.router.frontend.openai.errors import Header
from pdserve.router.frontend.openai.pooled import BEHIND, MAX_UNDER_WAY

WHOLE_VOCABULARY = TOKENIZER.vocab_size


def floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


async def prefill_alone(door: HttpRouter) -> FakeWorker:
    """Attach a worker that computes prompts, and none that decodes."""
    worker = await door.router.worker(link.ROLE_PREFILL, "p0")
    await door.router.until_status(lambda status: len(status.workers) == 1)
    return worker


async def test_a_text_is_embedded_where_no_worker_decodes(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    worker = await prefill_alone(door)
    given = await door.client.embeddings.create(model=MODEL, input="hello", encoding_format="float")
    prompt = TOKENIZER.encode("hello", add_special=False)
    assert given.data[0].embedding == floats(vector_of(prompt))
    assert (given.object, given.data[0].object, given.model) == ("list", "embedding", MODEL)
    assert (given.usage.prompt_tokens, given.usage.total_tokens) == (5, 5)
    (place,) = worker.prefills
    assert not place.HasField("target")
    assert place.spec.sampling.pooling == inference.Pooling(kind=inference.POOLING_KIND_LAST, normalize=True)
    assert place.spec.priority == BEHIND


async def test_inputs_of_all_kinds_keep_their_order(start_http: StartHttp) -> None:
    door = await start_http()
    ids = [[number, 7] for number in range(1, 2 * MAX_UNDER_WAY + 9)]
    given = await door.client.embeddings.create(model=MODEL, input=ids)  # base64, which the client asks for
    assert [each.index for each in given.data] == list(range(len(ids)))
    assert [each.embedding for each in given.data] == [floats(vector_of(each)) for each in ids]
    assert given.usage.prompt_tokens == 2 * len(ids)
    (alone,) = (await door.client.embeddings.create(model=MODEL, input=[3, 4])).data
    assert alone.embedding == floats(vector_of([3, 4]))
    two = (await door.client.embeddings.create(model=MODEL, input=["ab", "c"])).data
    assert [each.embedding[0] for each in two] == [2, 1]


async def test_base64_is_the_vector_itself(start_http: StartHttp) -> None:
    door = await start_http()
    reply = await door.post("/v1/embeddings", input=[5, 6], encoding_format="base64")
    assert base64.b64decode(reply.json()["data"][0]["embedding"]) == vector_of([5, 6])
    assert reply.json()["pdserve"]["prefill_worker"] == "p0"


async def test_a_shortened_vector_has_length_1(start_http: StartHttp) -> None:
    door = await start_http()
    (given,) = (await door.client.embeddings.create(model=MODEL, input=[3, 4], dimensions=2)).data
    assert given.embedding == pytest.approx([2 / hypot(2, 3), 3 / hypot(2, 3)])


async def test_few_inputs_of_a_call_are_under_way_at_once(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    worker = await prefill_alone(door)
    worker.is_paused = True
    asked = door.client.with_options(timeout=0.5).embeddings.create(model=MODEL, input=[[5]] * (3 * MAX_UNDER_WAY))
    with pytest.raises(openai.APITimeoutError):
        await asked
    assert len(worker.prefills) == MAX_UNDER_WAY
    await worker.until(lambda: len({cancel.request_id for cancel in worker.cancels}) == MAX_UNDER_WAY)


async def test_a_lost_worker_costs_a_retry(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    lost = await prefill_alone(door)
    lost.is_paused = True
    (await door.router.worker(link.ROLE_PREFILL, "p1")).is_paused = False
    await door.router.until_status(lambda status: len(status.workers) == 2)
    ids = [[number, 7] for number in range(1, 41)]
    call = door.client.embeddings.create(model=MODEL, input=ids)

    async def lose() -> None:
        await lost.until(lambda: bool(lost.prefills))
        await lost.die()

    given, _ = await asyncio.gather(call, lose())
    assert [each.embedding for each in given.data] == [floats(vector_of(each)) for each in ids]


async def test_an_input_that_is_too_long_ends_the_call_and_all_of_its_inputs(start_http: StartHttp) -> None:
    door = await start_http(max_model_len=100)
    inputs = [[5], [6], [7] * 99, [8] * 100, [9]]
    assert len((await door.client.embeddings.create(model=MODEL, input=inputs[:3])).data) == 3
    with pytest.raises(openai.BadRequestError) as refused:
        await door.client.embeddings.create(model=MODEL, input=inputs)
    assert refused.value.param == "input[3]"
    assert "100 tokens, over the limit of 99" in refused.value.message
    assert refused.value.code == "context_length_exceeded"


async def test_a_call_counts_once_against_limits_of_requests(start_http: StartHttp, tmp_path: Path) -> None:
    key, digest = new_key()
    limits = "requests_per_s: 0.001, burst: 2, max_concurrent: 1"
    file = tmp_path / "keys.yaml"
    file.write_text(f"tenants: {{acme: {{keys: [{{id: a, sha256: {digest}}}], {limits}}}}}")
    file.chmod(0o600)
    door = await start_http(api_keys_file=file, key=key)
    for _ in range(2):
        assert len((await door.client.embeddings.create(model=MODEL, input=[[5]] * 30)).data) == 30
    with pytest.raises(openai.RateLimitError):
        await door.client.embeddings.create(model=MODEL, input=[5])


@pytest.mark.parametrize(
    ("asked", "param", "text"),
    [
        ({"input": ""}, "input", "it is empty"),
        ({"input": []}, "input", "a text, token ids (integers below 2**32), or a list of either is needed"),
        ({"input": ["a", ""]}, "input[1]", "it is empty"),
        ({"input": [[5, 6], []]}, "input[1]", "it is empty"),
        ({"input": ["a", 5]}, "input", "is needed"),
        ({"input": [5, True]}, "input", "is needed"),
        ({"input": 5}, "input", "is needed"),
        ({"input": [[5], [5] * 2048]}, "input[1]", "2048 tokens, over the limit of 2047"),
        ({"input": [5] * 3000}, "input", "3000 ids are too many"),
        ({"input": "word" * 9000}, "input", "maximum context length is 2048"),
        ({"input": [WHOLE_VOCABULARY]}, "input", f"token id {WHOLE_VOCABULARY} at position 0 is outside"),
        ({"input": ["a"] * 2049}, "input", "2049 inputs are outside [1, 2048]"),
        ({"input": "a", "dimensions": 5}, "dimensions", "5 is outside [1, 4]"),
        ({"input": "a", "dimensions": 0}, "dimensions", "0 is outside"),
        ({"input": "a", "dimensions": "many"}, "dimensions", "valid integer"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not truncated"),
        ({"input": "a", "normalize": True}, "normalize", "as the model's files say"),
        ({"input": "a", "slo": {"ttft_ms": -1}}, "slo.ttft_ms", "over 0"),
        ({}, "input", "field required"),
    ],
)
async def test_what_is_wrong_is_named(start_http: StartHttp, asked: dict[str, object], param: str, text: str) -> None:
    door = await start_http()
    reply = await door.post("/v1/embeddings", **asked)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert text in error["message"]


async def test_unknown_fields_and_models_are_told(start_http: StartHttp) -> None:
    door = await start_http()
    reply = await door.post("/v1/embeddings", input="a", user="somebody", flavour="plain")
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (200, "flavour")
    with pytest.raises(openai.NotFoundError):
        await door.client.embeddings.create(model="another", input="a")
    assert (await door.http.get("/v1/embeddings")).status_code == 405
    document = (await door.http.get("/openapi.json")).json()
    assert "/v1/embeddings" in document["paths"]
    assert "dimensions" in document["components"]["schemas"]["EmbeddingsRequest"]["properties"]


async def test_a_vector_in_the_place_of_tokens_is_the_workers_fault(start_http: StartHttp) -> None:
    """And tokens in the place of a vector are: the request is placed again, and fails in the end."""
    door = await start_http(pair=False, max_attempts=1)
    worker = await prefill_alone(door)
    worker.is_paused = True
    asked = door.http.post("/v1/embeddings", json={"input": [5, 6]})

    async def answer() -> None:
        await worker.until(lambda: bool(worker.prefills))
        spec = worker.prefills[0].spec
        token = link.TokenDelta(request_id=spec.request_id, token_ids=[7], finish_reason=inference.FINISH_REASON_STOP)
        await worker.step([token])

    reply, _ = await asyncio.gather(asked, answer())
    assert reply.status_code == 500
    assert "1 tokens and 0 bytes came in place of the vector" in reply.json()["error"]["message"]


async def test_vectors_are_counted_apart_from_answers(start_http: StartHttp) -> None:
    door = await start_http()
    await door.client.embeddings.create(model=MODEL, input=[[5]] * 3)
    shown = await metrics(door.http)
    assert shown["pdserve_pooled_seconds_count"] == "3.0"
    assert shown['vllm:time_to_first_token_seconds_count{model_name="tiny"}'] == "0.0"
    assert shown['vllm:request_prompt_tokens_count{model_name="tiny"}'] == "3.0"


async def metrics(http: httpx.AsyncClient) -> dict[str, str]:
    lines = (await http.get("/metrics")).text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


async def test_a_worker_that_makes_no_vectors_says_so_to_the_client(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    worker = await prefill_alone(door)
    worker.is_paused = True

    async def refuse() -> None:
        await worker.until(lambda: bool(worker.prefills))
        request_id = worker.prefills[0].spec.request_id
        detail = "pooling: what computes here makes no vectors of prompts"
        await worker.say(failed=link.Failed(request_id=request_id, code=link.FAILURE_CODE_INVALID, detail=detail))

    reply, _ = await asyncio.gather(door.http.post("/v1/embeddings", json={"input": "a"}), refuse())
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "pooling")


async def test_vectors_of_all_kinds_come_over_grpc(start_http: StartHttp) -> None:
    router = (await start_http()).router
    prompt = TOKENIZER.encode("hello", add_special=False)
    mean = inference.Pooling(kind=inference.POOLING_KIND_MEAN)
    replies = await collect(router.generate(text="hello", pooling=mean))
    (delta,) = [delta for reply in replies for delta in reply.deltas]
    assert (delta.pooled, delta.finish_reason) == (vector_of(prompt), inference.FINISH_REASON_STOP)
    assert (replies[-1].usage.prompt_tokens, replies[-1].usage.completion_tokens) == (5, 0)
    logits = inference.Pooling(kind=inference.POOLING_KIND_LOGITS, token_ids=[1, 2])
    replies = await collect(router.generate(text="hello", pooling=logits))
    assert len(replies[0].deltas[0].pooled) == 8


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"pooling": inference.Pooling()}, "pooling.kind: 0 is none of last, mean, logits"),
        ({"pooling": inference.Pooling(kind=3)}, "pooling.token_ids: 0 were given"),
        ({"pooling": inference.Pooling(kind=3, token_ids=[10**6])}, "pooling.token_ids: 1000000 is outside"),
        ({"pooling": inference.Pooling(kind=1), "temperature": 0.5}, "temperature: does not go with pooling"),
        ({"pooling": inference.Pooling(kind=1), "stop": ["a"]}, "stop: does not go with pooling"),
    ],
)
async def test_what_goes_with_no_pooling_is_named(start_http: StartHttp, fields: dict[str, object], text: str) -> None:
    code, details = await error_of((await start_http()).router.generate(text="hello", **fields))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text in details


@pytest.mark.parametrize(("encoding", "most"), [("float", 10), ("base64", 45)])
async def test_a_response_over_the_limit_is_refused_before_work_begins(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, encoding: str, most: int
) -> None:
    monkeypatch.setattr(embeddings, "MAX_RESPONSE_BYTES", 960)
    door = await start_http(pair=False)
    worker = await prefill_alone(door)
    reply = await door.post("/v1/embeddings", input=[[5]] * (most + 1), encoding_format=encoding)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input")
    assert f"{most + 1} vectors of 4 numbers" in error["message"]
    assert "over the limit of 960 for a response; send fewer inputs, or fewer dimensions" in error["message"]
    assert not worker.prefills
    assert (await door.post("/v1/embeddings", input=[[5]] * most, encoding_format=encoding)).status_code == 200
    fewer = await door.post("/v1/embeddings", input=[[5]] * (most + 1), encoding_format=encoding, dimensions=2)
    assert fewer.status_code == 200


async def test_a_long_response_is_written_in_parts(start_http: StartHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    door = await start_http()
    ids = [[number, 7] for number in range(1, 31)]
    whole = await door.post("/v1/embeddings", input=ids)
    monkeypatch.setattr(embeddings, "PART_BYTES", 64)  # four vectors
    parted = await door.post("/v1/embeddings", input=ids)
    assert "content-length" in whole.headers
    assert "content-length" not in parted.headers
    assert parted.json() == whole.json()
    assert [each["embedding"] for each in parted.json()["data"]] == [floats(vector_of(each)) for each in ids]


async def test_a_call_is_under_way_until_its_response_is_written(start_http: StartHttp, tmp_path: Path) -> None:
    """A client that does not read its vectors keeps its place among its tenant's calls."""
    key, digest = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"tenants: {{acme: {{keys: [{{id: a, sha256: {digest}}}], max_concurrent: 1}}}}")
    file.chmod(0o600)
    door = await start_http(api_keys_file=file, key=key)
    written, taken = asyncio.Event(), asyncio.Event()
    original = embeddings.respond_in_parts

    async def slow(send: Send, status: int, parts: Iterable[bytes], headers: Sequence[Header]) -> None:
        written.set()
        await taken.wait()
        await original(send, status, parts, headers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "PART_BYTES", 16)
        patch.setattr(embeddings, "respond_in_parts", slow)
        client = door.client.with_options(max_retries=0)
        first = asyncio.create_task(client.embeddings.create(model=MODEL, input=[[5], [6], [7]]))
        await written.wait()
        with pytest.raises(openai.RateLimitError):
            await client.embeddings.create(model=MODEL, input=[5])
        taken.set()
        assert len((await first).data) == 3
    assert len((await client.embeddings.create(model=MODEL, input=[5])).data) == 1


async def test_objectives_of_inputs_behind_others_count_from_when_they_begin(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    worker = await prefill_alone(door)
    worker.is_paused = True
    call = {"input": [[number, 7] for number in range(1, MAX_UNDER_WAY + 2)], "slo": {"ttft_ms": 400}}
    asked = asyncio.create_task(door.post("/v1/embeddings", **call))
    await worker.until(lambda: len(worker.prefills) == MAX_UNDER_WAY)
    await asyncio.sleep(0.5)
    worker.is_paused = False
    await worker.step([worker.delta(place.spec, 0, 0) for place in worker.prefills])
    reply = await asked
    assert (reply.status_code, len(reply.json()["data"])) == (200, MAX_UNDER_WAY + 1)


async def test_an_input_without_room_for_a_moment_is_tried_again(start_http: StartHttp) -> None:
    door = await start_http(max_num_requests=1, max_num_held=3)
    ids = [[number, 7] for number in range(1, 13)]
    given = await door.client.with_options(max_retries=0).embeddings.create(model=MODEL, input=ids)
    assert [each.embedding for each in given.data] == [floats(vector_of(each)) for each in ids]


async def test_no_input_is_tried_again_after_the_deadline(start_http: StartHttp) -> None:
    door = await start_http(max_num_requests=1, max_num_held=3, pair=False)
    (await prefill_alone(door)).is_paused = True
    began_s = asyncio.get_running_loop().time()
    reply = await door.post("/v1/embeddings", input=[[5]] * 9, deadline_ms=400)
    assert reply.status_code in (429, 504)
    assert 0.1 < asyncio.get_running_loop().time() - began_s < 2


async def test_pooling_has_the_vectors_of_embeddings_in_its_own_shape(start_http: StartHttp) -> None:
    door = await start_http()
    asked: dict[str, object] = {"input": ["hello", "you"], "dimensions": 2}
    embedded = (await door.post("/v1/embeddings", **asked)).json()
    pooled = (await door.post("/pooling", **asked, task="embed")).json()
    assert [each.pop("object") for each in pooled["data"]] == ["pooling"] * 2
    assert [each["data"] for each in pooled["data"]] == [each["embedding"] for each in embedded["data"]]
    assert pooled["usage"]["total_tokens"] == embedded["usage"]["total_tokens"]
    refused = await door.post("/pooling", **asked, task="token_embed")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")
