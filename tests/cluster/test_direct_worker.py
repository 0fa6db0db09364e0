"""A worker that answers clients itself, over vLLM's gRPC API, with no other router."""

import signal
from pathlib import Path

import grpc
import lone_process
import pytest
import torch
from scraping import scrape
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from transformers import PreTrainedModel

from pdserve.launch.authority import write_certificates
from pdserve.launch.folder import free_port
from pdserve.net.certificates import Part, public_files

pytestmark = pytest.mark.slow
PATIENCE_S = 60
PROMPT, NUM_TOKENS = list(range(5, 45)), 48


def request(**sampling: object) -> vllm.GenerateRequest:
    params = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    return vllm.GenerateRequest(
        request_id="one", tokenized=vllm.TokenizedInput(input_ids=PROMPT), sampling_params=params, stream=True
    )


@pytest.mark.long
@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_it_computes_from_the_prompt_to_the_end_and_drains(
    tmp_path: Path, model: Path, oracle: PreTrainedModel, role: str
) -> None:
    port, metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    opened = grpc.insecure_channel(f"127.0.0.1:{port}")
    settings: dict[str, object] = {
        "role": role,
        "routers": (),
        "dialect_port": port,
        "dtype": "float32",
        "num_pages": 600,
        "metrics_port": metrics_port,
    }
    if role == "mixed":  # in a cluster with certificates
        write_certificates(tmp_path, ("127.0.0.1",), 1)
        certificate, key = public_files(tmp_path)
        settings |= {"identity_dir": tmp_path / Part.WORKER, "ssl_certfile": certificate, "ssl_keyfile": key}
        believed = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
        opened = grpc.secure_channel(f"127.0.0.1:{port}", believed)
    command = lone_process.command(lone_process.DECODE, tmp_path, model, **settings)
    with lone_process.process(command, tmp_path) as worker, opened as channel:
        lone_process.until_serving(channel)
        if role == "mixed":
            shown = scrape(f"127.0.0.1:{metrics_port}")
            called = "pdserve_tls_connections_called_total"
            assert [shown.value(called, port=name) for name in ("handoff", "public")] == [0, 1]
        replies = VllmEngineStub(channel).Generate(request(), timeout=PATIENCE_S)
        tokens = list(next(replies).chunk.token_ids)
        worker.send_signal(signal.SIGTERM)  # what has begun is finished
        for reply in replies:
            tokens += reply.chunk.token_ids
        assert worker.wait(PATIENCE_S) == 0
    with torch.no_grad():
        scores = oracle(torch.tensor([PROMPT + tokens])).logits[0]
    assert tokens == scores[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert len(tokens) == NUM_TOKENS
