"""Show what a router tells everybody on its public port: whether it serves, and its models."""

import json

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve import rpc
from pdserve.cli.stream import failure
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub

SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"].full_name
CALL_TIMEOUT_S = 10.0


async def show_public_status(endpoint: str, *, as_json: bool) -> None:
    """Print it. CommandError where nobody answers."""
    async with grpc.aio.insecure_channel(endpoint, options=rpc.channel_options(rpc.PUBLIC_MESSAGE_BYTES)) as channel:
        try:
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # its stubs lack it
            health = await check(asked, timeout=CALL_TIMEOUT_S)
            stub = InferenceServiceStub(channel)
            models = (await stub.ListModels(inference.ListModelsRequest(), timeout=CALL_TIMEOUT_S)).models
        except grpc.aio.AioRpcError as error:
            raise failure(endpoint, error) from error
    serving = health.status == health_pb2.HealthCheckResponse.SERVING
    if as_json:
        shown = [
            MessageToDict(model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for model in models
        ]
        typer.echo(json.dumps({"endpoint": endpoint, "serving": serving, "models": shown}, indent=2))
        return
    typer.echo(f"{endpoint}: " + ("serving" if serving else "up, but no pair of workers can serve a request"))
    for model in models:
        typer.echo(f"{model.name}: up to {model.max_model_len} tokens, prompt and answer together")
