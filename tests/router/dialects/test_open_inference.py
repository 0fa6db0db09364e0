"""The Open Inference Protocol on a router, with Triton's streams."""

import json
import struct
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_fakes import MODEL, TOKENIZER, RouterUnderTest, StartRouter, tokens_of

from pdserve.proto.v1 import open_inference_pb2 as protocol
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

Input = protocol.ModelInferRequest.InferInputTensor
Values = protocol.InferTensorContents
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


def answer(text: str, num_tokens: int) -> str:
    return TOKENIZER.decode(tokens_of(TOKENIZER.encode(text, add_special=False), num_tokens))


def request(text: str = "hello", *, streams: bool | None = None, **fields: object) -> protocol.ModelInferRequest:
    inputs = [Input(name="text_input", datatype="BYTES", shape=[1], contents=Values(bytes_contents=[text.encode()]))]
    if streams is not None:
        inputs.append(Input(name="stream", datatype="BOOL", shape=[1], contents=Values(bool_contents=[streams])))
    asked = protocol.ModelInferRequest(model_name=MODEL, id=text, inputs=inputs)
    for name, value in fields.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(asked.parameters[name], kind, value)
    return asked


def outputs(reply: protocol.ModelInferResponse) -> dict[str, str]:
    """Return a reply's tensors, each of one text."""
    found = {}
    for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True):
        assert (output.datatype, list(output.shape), struct.unpack_from("<I", raw)) == ("BYTES", [1], (len(raw) - 4,))
        found[output.name] = raw[4:].decode()
    return found


async def infer(router: RouterUnderTest, asked: protocol.ModelInferRequest) -> dict[str, str]:
    return outputs(await GRPCInferenceServiceStub(router.public).ModelInfer(asked, timeout=10))


async def stream(
    router: RouterUnderTest, *asked: protocol.ModelInferRequest
) -> list[protocol.ModelStreamInferResponse]:
    async def requests() -> AsyncIterator[protocol.ModelInferRequest]:
        for each in asked:
            yield each

    call = GRPCInferenceServiceStub(router.public).ModelStreamInfer(requests(), timeout=10)
    return [reply async for reply in call]


async def test_a_prompt_is_answered_with_its_text_and_why_it_ended(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    assert await infer(router, request(max_tokens=6)) == {"text_output": answer("hello", 6), "finish_reason": "length"}
    text = answer("hello", 12)
    stopped = await infer(router, request(max_tokens="12", stop=text[4:6]))
    assert stopped == {"text_output": text.partition(text[4:6])[0], "finish_reason": "stop"}


async def test_a_boolean_may_be_a_number_and_what_is_null_is_left_out(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    given = {"max_tokens": 2, "skip_special_tokens": 0, "temperature": None, "stop": None}
    asked = request(ignore_eos=1)
    asked.inputs.append(
        Input(
            name="sampling_parameters",
            datatype="BYTES",
            shape=[1],
            contents=Values(bytes_contents=[json.dumps(given).encode()]),
        )
    )
    assert await infer(router, asked) == {"text_output": answer("hello", 2), "finish_reason": "length"}
    assert prefill.prefills[0].spec.sampling.ignore_eos


async def test_tensors_may_come_raw_and_parameters_as_json(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    sampling = json.dumps({"max_tokens": 3, "temperature": 0.5, "stop": ["x", "y"]}).encode()
    names = {"text_input": b"hello", "sampling_parameters": sampling}
    asked = protocol.ModelInferRequest(
        model_name=MODEL,
        model_version="1",
        inputs=[Input(name=name, datatype="BYTES", shape=[1]) for name in names],
        raw_input_contents=[struct.pack("<I", len(value)) + value for value in names.values()],
        outputs=[protocol.ModelInferRequest.InferRequestedOutputTensor(name="text_output")],
    )
    assert await infer(router, asked) == {"text_output": answer("hello", 3)}
    assert prefill.prefills[0].spec.sampling.temperature == 0.5


async def test_a_stream_answers_several_requests_each_in_parts(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    replies = await stream(
        router, request("one", streams=True, max_tokens=9), request("two", max_tokens=5), request("bad", top_p=7.0)
    )
    by_id: dict[str, list[protocol.ModelStreamInferResponse]] = {}
    for reply in replies:
        by_id.setdefault(reply.infer_response.id, []).append(reply)
    parts = [outputs(reply.infer_response) for reply in by_id["one"]]
    assert "".join(part["text_output"] for part in parts) == answer("one", 9)
    assert [part.get("finish_reason") for part in parts] == [None] * (len(parts) - 1) + ["length"]
    final = [reply.infer_response.parameters["triton_final_response"].bool_param for reply in by_id["one"]]
    assert final == [False] * (len(parts) - 1) + [True]
    (whole,) = by_id["two"]
    assert outputs(whole.infer_response) == {"text_output": answer("two", 5), "finish_reason": "length"}
    (bad,) = by_id["bad"]
    assert bad.error_message == "INVALID_ARGUMENT: top_p: 7.0 is outside (0.0, 1.0]"


async def test_a_stream_that_is_cancelled_frees_both_workers(start_router: StartRouter) -> None:
    router = await start_router()
    _, decode = await router.pair()
    decode.max_step = 1
    call = GRPCInferenceServiceStub(router.public).ModelStreamInfer(timeout=10)
    for text in ("one", "two"):
        await call.write(request(text, streams=True, max_tokens=50))
    await call.read()
    call.cancel()
    await decode.until(lambda: len({cancel.request_id for cancel in decode.cancels}) == 2)
    await router.until_idle()


async def test_a_stream_of_a_slow_reader_ends_without_hurting_others(start_router: StartRouter) -> None:
    router = await start_router(max_unsent_bytes=1024, stream_interval=1)
    _, decode = await router.pair()
    small_window = (("grpc.http2.bdp_probe", 0),)
    async with grpc.aio.insecure_channel(router.addresses.public, options=small_window) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer()
        for text in ("one", "two"):
            await call.write(request(text, streams=True, max_tokens=1500))
        await decode.until(lambda: bool(decode.cancels))
        await router.until_idle()
        assert await infer(router, request(max_tokens=2)) == {
            "text_output": answer("hello", 2),
            "finish_reason": "length",
        }
        replies = iter_replies(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [reply async for reply in replies]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def iter_replies(call: grpc.aio.StreamStreamCall) -> AsyncIterator[object]:
    while (reply := await call.read()) is not grpc.aio.EOF:
        yield reply


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (protocol.ModelInferRequest(model_name=MODEL), INVALID, "text_input: the request has no such input"),
        (request(streams=True), INVALID, "stream: ModelStreamInfer streams, this call does not"),
        (request(max_tokns=3), INVALID, "parameters: 'max_tokns' is none of temperature, top_p, "),
        (request(max_tokens="many"), INVALID, "max_tokens: many is not of its type: "),
        (request(max_tokens=2.5), INVALID, "max_tokens: 2.5 is not of its type: Couldn't parse integer: 2.5"),
        (request(priority=2**40), INVALID, "priority: 1099511627776 is not of its type: "),
        (protocol.ModelInferRequest(model_name="gpt-5", inputs=request().inputs), NOT_FOUND, "model: 'gpt-5' is not"),
        (
            protocol.ModelInferRequest(model_name=MODEL, model_version="2", inputs=request().inputs),
            NOT_FOUND,
            "version: '2' of 'tiny' is not served",
        ),
        (
            protocol.ModelInferRequest(
                inputs=[Input(name="text_input", datatype="BYTES", shape=[1])], raw_input_contents=[b"\x09\0\0\0a"]
            ),
            INVALID,
            "text_input: its 5 bytes are no elements with their lengths",
        ),
        (
            protocol.ModelInferRequest(inputs=[Input(name="text_input", datatype="INT32", shape=[1])]),
            INVALID,
            "text_input: datatype 'INT32' is neither BYTES nor BOOL",
        ),
        (
            protocol.ModelInferRequest(
                inputs=[
                    Input(name="text_input", datatype="BYTES", shape=[2], contents=Values(bytes_contents=[b"a", b"b"]))
                ]
            ),
            INVALID,
            "text_input: more values than one of shape [2], exactly one of shape [1] is needed",
        ),
        (
            protocol.ModelInferRequest(
                inputs=[Input(name="text_input", datatype="BYTES", shape=[1])],
                raw_input_contents=[b"\0\0\0\0" * 2 + b"what is behind them is not read"],
            ),
            INVALID,
            "text_input: more values than one of shape [1], ",
        ),
        (
            protocol.ModelInferRequest(inputs=[*request().inputs, *request("other").inputs]),
            INVALID,
            "inputs: 'text_input' is there more than once",
        ),
        (
            protocol.ModelInferRequest(
                inputs=[Input(name="stream", datatype="BOOL", shape=[1])], raw_input_contents=[b"\1\1\1"]
            ),
            INVALID,
            "stream: more values than one of shape [1], ",
        ),
    ],
)
async def test_what_cannot_be_served_names_its_field(
    start_router: StartRouter, asked: protocol.ModelInferRequest, code: grpc.StatusCode, message: str
) -> None:
    router = await start_router()
    await router.pair()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await infer(router, asked)
    assert caught.value.code() is code
    assert (caught.value.details() or "").startswith(message)


async def test_clients_learn_what_is_served(start_router: StartRouter) -> None:
    router = await start_router()
    stub = GRPCInferenceServiceStub(router.public)
    assert (await stub.ServerLive(protocol.ServerLiveRequest())).live
    assert not (await stub.ServerReady(protocol.ServerReadyRequest())).ready
    await router.pair()
    assert (await stub.ServerReady(protocol.ServerReadyRequest())).ready
    assert (await stub.ModelReady(protocol.ModelReadyRequest(name=MODEL))).ready
    assert not (await stub.ModelReady(protocol.ModelReadyRequest(name="gpt-5"))).ready
    assert (await stub.ServerMetadata(protocol.ServerMetadataRequest())).name == "pdserve"
    metadata = await stub.ModelMetadata(protocol.ModelMetadataRequest(name=MODEL))
    assert [(tensor.name, tensor.datatype) for tensor in metadata.inputs] == [
        ("text_input", "BYTES"),
        ("stream", "BOOL"),
    ]
    config = (await stub.ModelConfig(protocol.ModelConfigRequest(name=MODEL))).config
    assert config.model_transaction_policy.decoupled
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.ModelConfig(protocol.ModelConfigRequest(name="gpt-5"))


async def test_the_repository_has_every_name_with_its_state(start_router: StartRouter) -> None:
    router = await start_router(served_model_aliases=["other"], pool_grace_s=0)
    stub = GRPCInferenceServiceStub(router.public)
    found = (await stub.RepositoryIndex(protocol.RepositoryIndexRequest())).models
    expected = [(name, "1", "UNAVAILABLE", "no pair of workers serves") for name in (MODEL, "other")]
    assert [(each.name, each.version, each.state, each.reason) for each in found] == expected
    assert not (await stub.RepositoryIndex(protocol.RepositoryIndexRequest(ready=True))).models
    await router.pair()
    found = (await stub.RepositoryIndex(protocol.RepositoryIndexRequest(ready=True))).models
    assert [(each.name, each.state) for each in found] == [(MODEL, "READY"), ("other", "READY")]


async def test_statistics_count_what_was_answered_and_what_failed(start_router: StartRouter) -> None:
    router = await start_router()
    await router.pair()
    stub = GRPCInferenceServiceStub(router.public)
    asked = protocol.ModelStatisticsRequest(name=MODEL)
    (before,) = (await stub.ModelStatistics(asked)).model_stats
    assert (before.inference_count, before.inference_stats.success.ns, before.inference_stats.fail.count) == (0, 0, 0)
    for _ in range(3):
        await infer(router, request(max_tokens=4))
    with pytest.raises(grpc.aio.AioRpcError):
        await infer(router, request(top_p=7.0))
    for name in (MODEL, ""):
        (found,) = (await stub.ModelStatistics(protocol.ModelStatisticsRequest(name=name))).model_stats
        stats = found.inference_stats
        assert (found.name, found.version, found.inference_count) == (MODEL, "1", 3)
        assert (stats.success.count, stats.queue.count, stats.compute_infer.count, stats.fail.count) == (3, 3, 3, 1)
        assert stats.success.ns == pytest.approx(stats.queue.ns + stats.compute_infer.ns, abs=10)
        assert stats.success.ns > 0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ModelStatistics(protocol.ModelStatisticsRequest(name="gpt-5"))
    assert refused.value.code() is NOT_FOUND


async def test_reflection_lists_every_dialect(start_router: StartRouter) -> None:
    router = await start_router()
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(router.public)
    call = stub.ServerReflectionInfo()
    await call.write(asked)
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names >= {"inference.GRPCInferenceService", "vllm.grpc.engine.VllmEngine", "pdserve.v1.InferenceService"}
    await call.done_writing()
