"""Make requests for the public endpoint from what the command line says."""

from collections.abc import Iterable

from pdserve.proto.v1 import inference_pb2 as inference


def sampling(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> inference.SamplingParams:
    """Return sampling with the given fields set; None leaves a field to the router's default."""
    return inference.SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def new_request(params: inference.SamplingParams, stop: Iterable[str]) -> inference.GenerateRequest:
    """Return a request that lacks only its prompt."""
    return inference.GenerateRequest(sampling=params, stop=stop)


def add_message(request: inference.GenerateRequest, role: str, content: str) -> None:
    """Append a message to the request's conversation."""
    request.chat.messages.append(inference.ChatMessage(role=role, content=content))
