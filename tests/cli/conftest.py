"""A public endpoint with a model that counts, and a way to run commands against it."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.cli.app import main
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

VOCAB_SIZE = 100
SERVING = health_pb2.HealthCheckResponse.SERVING

Ended = CompletedProcess[str]


class CountingModel(InferenceServiceServicer):
    """Answers "1 2 3 …", one token a reply, to every continuation; refuses what the tests need refused."""

    def __init__(self) -> None:
        self.requests: list[inference.GenerateRequest] = []

    def ListModels(self, request: object, context: object) -> inference.ListModelsResponse:  # noqa: N802
        del request, context
        return inference.ListModelsResponse(models=[inference.Model(name="counting", vocab_size=VOCAB_SIZE)])

    def Generate(  # noqa: N802
        self, request: inference.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.GenerateResponse]:
        self.requests.append(request)
        if request.sampling.max_tokens == 13:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: 13 brings bad luck")
        if request.chat.messages and request.chat.messages[-1].content == "unlucky":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "messages: unlucky")
        num_sequences = request.sampling.n or 1
        for position in range(request.sampling.max_tokens):
            yield inference.GenerateResponse(
                deltas=[
                    inference.SequenceDelta(index=index, token_ids=[position], text=f" {position + 1}")
                    for index in range(num_sequences)
                ]
            )
        yield inference.GenerateResponse(
            request_id="abc",
            deltas=[
                inference.SequenceDelta(index=index, finish_reason=inference.FINISH_REASON_LENGTH)
                for index in range(num_sequences)
            ],
            usage=inference.Usage(prompt_tokens=5, completion_tokens=request.sampling.max_tokens * num_sequences),
            ledger=inference.Ledger(
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                attempts=1,
                handoff_bytes=2_500_000,
                handoff_ms=1.25,
                ttft_ms=40.4,
                tpot_ms=7.89,
            ),
        )


@pytest.fixture(scope="module")
def model() -> CountingModel:
    return CountingModel()


@pytest.fixture(scope="module")
def address(model: CountingModel) -> Iterator[str]:
    """Where the counting model is served."""
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        servicer = health.HealthServicer()
        servicer.set(inference.DESCRIPTOR.services_by_name["InferenceService"].full_name, SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        add_InferenceServiceServicer_to_server(model, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def requests(model: CountingModel) -> list[inference.GenerateRequest]:
    """What the counting model was asked, the latest last."""
    return model.requests


@pytest.fixture
def pdserve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command in this process and return how it ended."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["pdserve", *arguments])
        monkeypatch.setenv("COLUMNS", "400")
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return CompletedProcess(arguments, status, out, err)

    return run
