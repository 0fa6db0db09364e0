"""vLLM's gRPC API on a router: chunks, completions and ends as vLLM's servicer has them."""

import hashlib
import io
import secrets
import zipfile
from pathlib import Path

import grpc
import pytest
from router_fakes import MODEL, TOKENIZER, RouterUnderTest, StartRouter, tokens_of
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.router.frontend.answer import Gain
from pdserve.router.frontend.clients import new_key
from pdserve.router.frontend.dialects.vllm_messages import Replies

Params = vllm.SamplingParams
INVALID, CANCELLED, UNIMPLEMENTED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED,
)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


def request(text: str = "hello", *, stream: bool = True, **params: object) -> vllm.GenerateRequest:
    tokenized = vllm.TokenizedInput(original_text=text, input_ids=ids(text))
    return vllm.GenerateRequest(request_id="r1", tokenized=tokenized, sampling_params=Params(**params), stream=stream)


async def replies_to(router: RouterUnderTest, asked: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
    return [reply async for reply in VllmEngineStub(router.public).Generate(asked, timeout=10)]


async def test_a_stream_has_chunks_of_what_is_new_and_then_a_completion(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    replies = await replies_to(router, request(max_tokens=6))
    *chunks, last = replies
    assert all(reply.WhichOneof("response") == "chunk" for reply in chunks)
    assert [token for reply in chunks for token in reply.chunk.token_ids] == tokens_of(ids("hello"), 6)
    assert all(reply.chunk.completion_tokens == len(reply.chunk.token_ids) for reply in chunks)
    assert {reply.chunk.prompt_tokens for reply in chunks} == {5}
    complete = last.complete
    assert (complete.finish_reason, complete.prompt_tokens, complete.cached_tokens) == ("length", 5, 1)
    assert list(complete.output_ids) == list(chunks[-1].chunk.token_ids), "the last tokens come again"


async def test_without_a_stream_one_completion_has_everything(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    prefill.logprobs_per_token = decode.logprobs_per_token = 2
    asked = request(stream=False, max_tokens=4, n=2, logprobs=2, prompt_logprobs=1)
    replies = [reply.complete for reply in await replies_to(router, asked)]
    assert [reply.index for reply in replies] == [0, 1]
    for index, reply in enumerate(replies):
        assert list(reply.output_ids) == tokens_of(ids("hello"), 4, index)
        assert reply.completion_tokens == 4
        assert list(reply.output_logprobs.token_ids) == list(reply.output_ids)
        assert [list(top.values) for top in reply.output_logprobs.top_logprobs] == [[-1.0, -1.0]] * 4
        scores = reply.input_logprobs
        assert list(scores.token_ids) == ids("hello")
        assert [score.HasField("value") for score in scores.token_logprobs] == [False, True, True, True, True]
        assert [score.value for score in scores.token_logprobs[1:]] == [-1.0, -2.0, -3.0, -4.0]
        assert [list(top.token_ids) for top in scores.top_logprobs] == [[], [0], [0], [0], [0]]


async def test_a_streams_first_chunk_alone_has_the_prompts_log_probabilities(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    replies = await replies_to(router, request(max_tokens=4, prompt_logprobs=0))
    assert len(replies[0].chunk.input_logprobs.token_ids) == 5
    assert not any(reply.chunk.HasField("input_logprobs") for reply in replies[1:-1])
    assert not replies[-1].complete.HasField("input_logprobs")


async def test_what_ended_an_answer_is_named(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    tokens = tokens_of(ids("hello"), 12)
    text = TOKENIZER.decode(tokens)
    by_text = (await replies_to(router, request(max_tokens=12, stop=[text[4:6]])))[-1].complete
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", text[4:6])
    by_length = (await replies_to(router, request(max_tokens=2)))[-1].complete
    assert by_length.WhichOneof("matched_stop") is None


async def test_zeros_of_the_message_are_not_values(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    await replies_to(router, vllm.GenerateRequest(text="hello", sampling_params=Params(seed=-1), stream=True))
    sampling = prefill.prefills[0].spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.n) == (1.0, 1.0, 1.0, 1)
    assert sampling.seed == 2**64 - 1
    assert sampling.max_tokens == 2048 - 5, "as much as there is room for"


async def test_structured_outputs_and_truncation_are_passed_on(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    choice = vllm.ChoiceConstraint(choices=["a", "b"])
    asked = request("hello", max_tokens=1, choice=choice, truncate_prompt_tokens=3)
    await replies_to(router, asked)
    spec = prefill.prefills[0].spec
    assert list(spec.sampling.structured_output.choice.texts) == ["a", "b"]
    assert spec.num_prompt_tokens == 3


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (vllm.GenerateRequest(), INVALID, "input: none was given; tokenized or text is needed"),
        (request(logprobs=-1), INVALID, "logprobs: -1 is below 0: all tokens are never reported"),
        (request(logit_bias={-1: 1.0}), INVALID, "logit_bias token: -1 is below 0"),
        (request(temperature=-1.0), INVALID, "temperature: -1.0 is outside [0.0, 100.0]"),
        (request(structural_tag="x"), INVALID, "structural_tag: it is not served; "),
        (
            vllm.GenerateRequest(text="a", kv_transfer_params_json="{}"),
            INVALID,
            "kv_transfer_params_json: a router hands",
        ),
    ],
)
async def test_what_cannot_be_served_names_its_field(
    start_router: StartRouter, asked: vllm.GenerateRequest, code: grpc.StatusCode, message: str
) -> None:
    router = await start_router()
    await router.pair()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replies_to(router, asked)
    assert caught.value.code() is code
    assert (caught.value.details() or "").startswith(message)


async def test_an_abort_from_elsewhere_frees_both_workers(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, decode = await router.pair()
    decode.max_step = 1
    stub = VllmEngineStub(router.public)
    replies = aiter(stub.Generate(request(max_tokens=50), timeout=10))
    await anext(replies)
    await stub.Abort(vllm.AbortRequest(request_ids=["unknown", "r1"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [reply async for reply in replies]
    assert (caught.value.code(), caught.value.details()) == (CANCELLED, "the request was aborted")
    await decode.until(lambda: bool(decode.cancels))
    await router.until_idle()
    assert prefill.prefills


async def rest_of(call: grpc.aio.UnaryStreamCall) -> None:
    """Read a call to its end: its status is known once all replies before it are read."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_tenants_abort_their_own_requests_alone(start_router: StartRouter, tmp_path: Path) -> None:
    keys = {"a": new_key(), "b": new_key()}
    file = tmp_path / "keys.yaml"
    tenants = [f"{name}: {{keys: [{{id: k, sha256: {digest}}}]}}" for name, (_, digest) in keys.items()]
    file.write_text(f"tenants: {{{', '.join(tenants)}}}\n")
    file.chmod(0o600)
    router = await start_router(api_keys_file=file)
    _, decode = await router.pair()
    decode.max_step = 1
    stub = VllmEngineStub(router.public)
    own, other = ((("authorization", f"Bearer {shown}"),) for shown, _ in keys.values())
    named, nameless = request(max_tokens=50), request(max_tokens=50)
    nameless.request_id = ""
    first, second = (stub.Generate(each, timeout=10, metadata=own) for each in (named, nameless))
    await first.read()
    await second.read()
    for caller, names in ((other, ["r1"]), (own, [""]), (own, ["r1"])):
        assert not decode.cancels
        await stub.Abort(vllm.AbortRequest(request_ids=names), metadata=caller)
    await decode.until(lambda: bool(decode.cancels))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await rest_of(first)
    assert ended.value.code() is CANCELLED
    assert not second.done()
    second.cancel()
    await router.until_idle()


@pytest.mark.parametrize(("match", "shown_as"), [(0, "matched_token_id"), ("x", "matched_stop_str"), (None, None)])
def test_an_end_names_what_it_matched(match: str | int | None, shown_as: str | None) -> None:
    gain = Gain(0, finish_reason=inference.FINISH_REASON_STOP, stop_match=match)
    (end,) = Replies(inference.GenerateRequest(), streams=True).take((), [gain], None)
    assert end.complete.finish_reason == "stop"
    assert end.complete.WhichOneof("matched_stop") == shown_as
    assert shown_as is None or getattr(end.complete, shown_as) == match


async def test_what_gateways_ask_of_an_engine_is_answered_for_the_cluster(start_router: StartRouter) -> None:
    router = await start_router()
    stub = VllmEngineStub(router.public)
    assert not (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    await router.pair()
    assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.is_generation) == (MODEL, 2048, True)
    server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.active_requests, server.max_num_seqs, server.kv_connector) == (0, 64, "")
    (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
    assert (load.num_running_reqs, load.max_total_num_tokens) == (0, 1000 * 16)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Embed(vllm.EmbedRequest())
    assert (caught.value.code(), caught.value.details()) == (
        UNIMPLEMENTED,
        "Embed: the models served here generate text",
    )


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(start_router: StartRouter) -> None:
    files = io.BytesIO()
    with zipfile.ZipFile(files, "w") as archive:
        archive.writestr("tokenizer.json", secrets.token_bytes(200_000))
    router = await start_router(archived=files.getvalue)
    chunks = [chunk async for chunk in VllmEngineStub(router.public).GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert data == files.getvalue()
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    assert len(chunks) > 1
