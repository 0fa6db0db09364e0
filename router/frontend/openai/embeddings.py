"""Vectors of texts: POST /v1/embeddings, as OpenAI's API has them, and POST /pooling, as vLLM's."""

import base64
import struct
from collections.abc import Iterator
from math import sqrt

from starlette.types import Scope, Send

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.pooling import FLOAT_BYTES
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai.dialect import Json, encode
from pdserve.router.frontend.openai.errors import JSON
from pdserve.router.frontend.openai.fields import EmbeddingsRequest, PoolingRequest
from pdserve.router.frontend.openai.generation import headers_of
from pdserve.router.frontend.openai.pooled import PooledCall, pooled_template
from pdserve.router.frontend.openai.reply import respond, respond_in_parts
from pdserve.router.frontend.openai.translate import prompts_of, with_prompt

MAX_INPUTS = 2048
MAX_RESPONSE_BYTES = 2**26  # of the vectors of one call, as they are written
NUMBER_BYTES = {"float": 24, "base64": 16 / 3}  # of a float32: as JSON at most (-1.1754943508222875e-38,), as base64
PART_BYTES = 2**14  # of vectors that are written without a pause: half a millisecond of the event loop


class Embedder:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def embed(self, asked: EmbeddingsRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/embeddings and /pooling. Raises what `errors.refused_by` knows."""
        headers, model = headers_of(scope), self._intake.model
        if model.embedding.refusal:
            raise invalid("model", f"it makes no vectors of texts: {model.embedding.refusal}")
        template = pooled_template(asked, headers, model.embedding.pooling)
        if asked.add_special_tokens is not None:
            template.add_special_tokens = asked.add_special_tokens
        if asked.dimensions is not None and not 1 <= asked.dimensions <= model.hidden_size:
            raise invalid("dimensions", f"{asked.dimensions} is outside [1, {model.hidden_size}]")
        inputs = prompts_of(asked.input, "input", MAX_INPUTS)
        _check_size(len(inputs), asked.dimensions or model.hidden_size, asked.encoding_format or "float")

        def request_of(place: int) -> inference.GenerateRequest:
            return with_prompt(template, inputs[place])

        call = PooledCall(self._intake, asked, scope, _name if len(inputs) > 1 else _alone, request_of)
        async with call.served(len(inputs)) as is_there:
            if not is_there:
                return
            parts, shown = self._written(asked, call), [*JSON, *call.headers]
            if sum(map(len, call.vectors)) <= PART_BYTES:
                await respond(send, 200, b"".join(parts), shown)
            else:
                await respond_in_parts(send, 200, parts, shown)

    def _written(self, asked: EmbeddingsRequest, call: PooledCall) -> Iterator[bytes]:
        """Yield the response in parts of about PART_BYTES of vectors each, or of one vector."""
        normalizes, num_bytes = self._intake.model.embedding.pooling.normalizes, 0
        kind, name = ("pooling", "data") if isinstance(asked, PoolingRequest) else ("embedding", "embedding")
        part = encode({"object": "list", **call.shown()})[:-1] + b',"data":['
        for index, vector in enumerate(call.vectors):
            if num_bytes and num_bytes + len(vector) > PART_BYTES:
                yield part
                part, num_bytes = b"", 0
            cut = vector if asked.dimensions is None else shortened(vector, asked.dimensions, normalizes=normalizes)
            written = base64.b64encode(cut).decode() if asked.encoding_format == "base64" else numbers(cut)
            shown: Json = {"object": kind, "index": index, name: written}
            part += (b"," if index else b"") + encode(shown)
            num_bytes += len(vector)
        yield part + b"]}"


def _check_size(num_inputs: int, dimensions: int, encoding: str) -> None:
    """Raise RefusedError for a response over the limit."""
    num_bytes = int(num_inputs * dimensions * NUMBER_BYTES[encoding])
    if num_bytes > MAX_RESPONSE_BYTES:
        made = f"{num_inputs} vectors of {dimensions} numbers are up to {num_bytes} bytes as {encoding}"
        advice = "send fewer inputs, or fewer dimensions or encoding_format base64"
        raise invalid("input", f"{made}, over the limit of {MAX_RESPONSE_BYTES} for a response; {advice}")


def _alone(_place: int) -> str:
    return "input"


def _name(place: int) -> str:
    return f"input[{place}]"


def numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector)


def shortened(vector: bytes, dimensions: int, *, normalizes: bool) -> bytes:
    """Return the leading numbers of a vector, divided by their length if vectors are.

    That is how models are trained whose vectors may be cut (Kusupati et al., "Matryoshka Representation Learning",
    2022).
    """
    leading = numbers(vector[: FLOAT_BYTES * dimensions])
    if normalizes and (length := sqrt(sum([number * number for number in leading]))):
        leading = tuple([number / length for number in leading])
    return struct.pack(f"<{len(leading)}f", *leading)
