"""A tenant has one limit, by whichever door its requests come."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import httpx2
import pytest
from router_fakes import MODEL, RouterUnderTest, running_router
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import open_inference_pb2 as oip
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.proto.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub
from pdserve.router.frontend.clients import new_key

Ask = Callable[[RouterUnderTest, str], Awaitable[bool]]  # with a key; whether it is answered, and not over the limit


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def is_answered(call: grpc.aio.Call) -> bool:
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            assert [reply async for reply in call]  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


async def native(router: RouterUnderTest, key: str) -> bool:
    request = inference.GenerateRequest(text="a", sampling=inference.SamplingParams(max_tokens=1))
    return await is_answered(InferenceServiceStub(router.public).Generate(request, metadata=shown(key), timeout=10))


async def of_vllm(router: RouterUnderTest, key: str) -> bool:
    request = vllm.GenerateRequest(request_id="r", text="a", sampling_params=vllm.SamplingParams(max_tokens=1))
    return await is_answered(VllmEngineStub(router.public).Generate(request, metadata=shown(key), timeout=10))


def tensors() -> oip.ModelInferRequest:
    text = oip.InferTensorContents(bytes_contents=[b"a"])
    asked = oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1], contents=text)
    request = oip.ModelInferRequest(model_name=MODEL, inputs=[asked])
    request.parameters["max_tokens"].int64_param = 1
    return request


async def of_triton(router: RouterUnderTest, key: str) -> bool:
    stub = GRPCInferenceServiceStub(router.public)
    return await is_answered(stub.ModelInfer(tensors(), metadata=shown(key), timeout=10))


async def of_tritons_stream(router: RouterUnderTest, key: str) -> bool:
    stub = GRPCInferenceServiceStub(router.public)
    replies = [reply async for reply in stub.ModelStreamInfer(iter([tensors()]), metadata=shown(key), timeout=10)]
    errors = [reply.error_message for reply in replies if reply.error_message]
    assert all(error.endswith("requests a second") for error in errors), errors
    return not errors


def of_http(path: str, body: dict[str, object]) -> Ask:
    async def ask(router: RouterUnderTest, key: str) -> bool:
        async with httpx2.AsyncClient() as http:
            reply = await http.post(f"{router.addresses.http}{path}", json=body, headers=dict(shown(key)))
        assert reply.status_code in (200, 429), reply.text
        return reply.status_code == httpx2.codes.OK

    return ask


DOORS: dict[str, Ask] = {
    "native": native,
    "vllm": of_vllm,
    "triton": of_triton,
    "triton's stream": of_tritons_stream,
    "completions": of_http("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    "chat": of_http("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    "tokenize": of_http("/tokenize", {"prompt": "a"}),
    "detokenize": of_http("/detokenize", {"tokens": [3]}),
}


@pytest.mark.parametrize("first", DOORS)
async def test_what_one_door_has_let_in_is_used_up_at_all_of_them(
    first: str, secret_file: Path, tmp_path: Path
) -> None:
    (key, digest), keys = new_key(), tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(f"tenants: {{acme: {{keys: [{{id: k, sha256: {digest}}}], requests_per_s: 0.001, burst: 1}}}}")
    async with running_router(secret_file, {"api_keys_file": keys, "http_port": 0}) as router:
        await router.pair()
        assert await DOORS[first](router, key)
        for name, ask in DOORS.items():
            assert not await ask(router, key), name
