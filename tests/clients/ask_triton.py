"""Asks a router as Triton's own client does, which has to be installed. Usage: ask_triton.py HOST:PORT MODEL"""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def inputs(text: str, *, streams: bool = False) -> list[triton.InferInput]:
    prompt = triton.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([text.encode()], dtype=object))
    stream = triton.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([streams]))
    return [prompt, stream]


def text_of(result: triton.InferResult, name: str = "text_output") -> str:
    return str(result.as_numpy(name)[0].decode())


def main(address: str, model: str) -> None:
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(model)
    assert [tensor.name for tensor in client.get_model_metadata(model).inputs] == ["text_input", "stream"]
    assert client.get_model_config(model).config.model_transaction_policy.decoupled
    greedy = {"max_tokens": 12, "temperature": 0.0}
    whole = client.infer(model, inputs("Once upon a time"), parameters=greedy)
    assert text_of(whole)
    assert text_of(whole, "finish_reason") == "length"
    replies: queue.Queue[triton.InferResult | InferenceServerException] = queue.Queue()
    client.start_stream(callback=lambda result, error: replies.put(error or result))
    client.async_stream_infer(model, inputs("Once upon a time", streams=True), request_id="1", parameters=greedy)
    parts, is_final = list[str](), False
    while not is_final:
        reply = replies.get(timeout=60)
        assert isinstance(reply, triton.InferResult), reply
        parts.append(text_of(reply))
        is_final = reply.get_response().parameters["triton_final_response"].bool_param
    assert "".join(parts) == text_of(whole)
    assert len(parts) > 1
    client.async_stream_infer(model, inputs("a"), request_id="2", parameters={"temperature": -1.0})
    error = replies.get(timeout=60)
    assert isinstance(error, InferenceServerException)
    assert "temperature: -1.0 is outside [0.0, 100.0]" in str(error)
    client.stop_stream()


main(sys.argv[1], sys.argv[2])
