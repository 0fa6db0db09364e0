"""Which doors of other servers' APIs a router opens."""

from importlib.util import find_spec

import grpc

from pdserve.proto.v1.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from pdserve.router.frontend.dialects.open_inference import OpenInference
from pdserve.router.frontend.intake import Intake

HAS_VLLM = find_spec("smg_grpc_proto") is not None  # the extra `dialects` installs it
DIALECTS = ("inference.GRPCInferenceService", *(("vllm.grpc.engine.VllmEngine",) if HAS_VLLM else ()))  # services


def add_dialects(server: grpc.aio.Server, intake: Intake) -> None:
    """Let a server serve DIALECTS."""
    add_GRPCInferenceServiceServicer_to_server(OpenInference(intake), server)
    if HAS_VLLM:
        from smg_grpc_proto.generated.vllm_engine_pb2_grpc import add_VllmEngineServicer_to_server  # noqa: PLC0415

        from pdserve.router.frontend.dialects.vllm_engine import VllmEngine  # noqa: PLC0415

        add_VllmEngineServicer_to_server(VllmEngine(intake), server)
