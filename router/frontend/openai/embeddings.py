"""POST /v1/embeddings: vectors of texts, as OpenAI's API has them."""

import asyncio
import base64
import struct
from math import sqrt

from starlette.types import Scope, Send

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.pooling import FLOAT_BYTES
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.openai.dialect import Json, encode
from pdserve.router.frontend.openai.errors import JSON
from pdserve.router.frontend.openai.fields import EmbeddingsRequest
from pdserve.router.frontend.openai.generation import headers_of
from pdserve.router.frontend.openai.pooled import PooledCall, pooled_template
from pdserve.router.frontend.openai.reply import respond
from pdserve.router.frontend.openai.translate import prompts_of, with_prompt

MAX_INPUTS = 2048
WRITTEN_INLINE = 2**16  # bytes of vectors that are written on the event loop, in a millisecond


class Embedder:
    """Serves the route."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def embed(self, scope: Scope, body: bytes, send: Send) -> None:
        """Serve POST /v1/embeddings. Raises what `errors.refused_by` knows."""
        asked, headers, model = EmbeddingsRequest.model_validate_json(body), headers_of(scope), self._intake.model
        if model.embedding.refusal:
            raise invalid("model", f"it makes no vectors of texts: {model.embedding.refusal}")
        template = pooled_template(asked, headers, model.embedding.pooling)
        if asked.add_special_tokens is not None:
            template.add_special_tokens = asked.add_special_tokens
        if asked.dimensions is not None and not 1 <= asked.dimensions <= model.hidden_size:
            raise invalid("dimensions", f"{asked.dimensions} is outside [1, {model.hidden_size}]")
        inputs = prompts_of(asked.input, "input", MAX_INPUTS)

        async def request_of(place: int) -> inference.GenerateRequest:
            return with_prompt(template, inputs[place])

        call = PooledCall(self._intake, asked, scope, _name if len(inputs) > 1 else _alone, request_of)
        if not await call.run(len(inputs)):
            return
        if sum(map(len, call.vectors)) <= WRITTEN_INLINE:
            written = self._written(asked, call)
        else:
            written = await asyncio.to_thread(self._written, asked, call)
        await respond(send, 200, written, [*JSON, *call.headers])

    def _written(self, asked: EmbeddingsRequest, call: PooledCall) -> bytes:
        data: list[Json] = []
        normalizes = self._intake.model.embedding.pooling.normalizes
        for index, vector in enumerate(call.vectors):
            cut = vector if asked.dimensions is None else shortened(vector, asked.dimensions, normalizes=normalizes)
            embedding = base64.b64encode(cut).decode() if asked.encoding_format == "base64" else numbers(cut)
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        return encode({"object": "list", **call.shown(), "data": data})


def _alone(_place: int) -> str:
    return "input"


def _name(place: int) -> str:
    return f"input[{place}]"


def numbers(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector."""
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
