"""POST /v1/rerank and /v1/score: how well documents answer a query, by models of Qwen3-Reranker's kind.

Responses are those of vLLM, which has them from Jina's and Cohere's APIs.
"""

import secrets
import struct
import time
from collections.abc import Callable

from starlette.types import Scope, Send

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.refusal import invalid
from pdserve.router.frontend.intake import Intake, Preparing
from pdserve.router.frontend.openai.dialect import Json, encode
from pdserve.router.frontend.openai.embeddings import MAX_INPUTS
from pdserve.router.frontend.openai.errors import JSON
from pdserve.router.frontend.openai.fields import RerankRequest, ScoreRequest
from pdserve.router.frontend.openai.generation import headers_of
from pdserve.router.frontend.openai.pooled import PooledCall, pooled_template
from pdserve.router.frontend.openai.reply import respond
from pdserve.router.frontend.openai.translate import with_texts
from pdserve.text.scoring import INSTRUCTION, ROLES, WORDS, score_of

# Prompt tokens of a call: about as many as a body of 4 MiB can have where no text is used twice. A query is used with
# each document.
MAX_CALL_TOKENS = 2**22
Pair = tuple[str, str]  # a query and a document


class Scorer:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def rerank(self, asked: RerankRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/rerank. Raises what `errors.refused_by` knows."""
        texts = [each if isinstance(each, str) else each.text for each in asked.documents]
        if not 1 <= len(texts) <= MAX_INPUTS:
            raise invalid("documents", f"{len(texts)} documents are outside [1, {MAX_INPUTS}]")
        _check("query", [asked.query])
        _check("documents", texts)
        pairs = [(asked.query, text) for text in texts]
        call = self._call(asked, scope, pairs, lambda place: f"documents[{place}]")
        async with call.served(len(pairs)) as is_there:
            if is_there:
                await respond(send, 200, _ranked(asked, texts, call), [*JSON, *call.headers])

    async def score(self, asked: ScoreRequest, scope: Scope, send: Send) -> None:
        """Serve POST /v1/score. Raises what `errors.refused_by` knows."""
        queries, texts = [[each] if isinstance(each, str) else each for each in (asked.text_1, asked.text_2)]
        if not 1 <= len(texts) <= MAX_INPUTS:
            raise invalid("text_2", f"{len(texts)} texts are outside [1, {MAX_INPUTS}]")
        if len(queries) not in (1, len(texts)):
            raise invalid("text_1", f"{len(queries)} texts; one, or as many as the {len(texts)} of text_2 are needed")
        _check("text_1", queries)
        _check("text_2", texts)
        pairs = list(zip(queries * (len(texts) if len(queries) == 1 else 1), texts, strict=True))
        call = self._call(asked, scope, pairs, lambda place: f"text_2[{place}]")
        async with call.served(len(pairs)) as is_there:
            if not is_there:
                return
            data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(_scores(call))]
            about = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
            await respond(send, 200, encode({**about, **call.shown(), "data": data}), [*JSON, *call.headers])

    def _call(
        self, asked: RerankRequest | ScoreRequest, scope: Scope, pairs: list[Pair], name_of: Callable[[int], str]
    ) -> PooledCall:
        scoring, intake = self._intake.model.scoring, self._intake
        if scoring is None:
            raise invalid("model", f"it scores no documents: its vocabulary has not all of {', '.join(WORDS)}")
        template = pooled_template(asked, headers_of(scope), Pooling("logits", scoring.token_ids))

        def request_of(place: int) -> inference.GenerateRequest:
            return with_texts(template, ROLES, (asked.instruction or INSTRUCTION, *pairs[place]))

        preparing = Preparing(template=scoring.template)
        return PooledCall(intake, asked, scope, name_of, request_of, preparing, MAX_CALL_TOKENS)


def _check(field: str, texts: list[str]) -> None:
    for place, text in enumerate(texts):
        if not text:
            name = field if len(texts) == 1 else f"{field}[{place}]"
            raise invalid(name, "it is empty, at least 1 character is needed")


def _scores(call: PooledCall) -> list[float]:
    return [score_of(*struct.unpack("<2f", vector)) for vector in call.vectors]


def _ranked(asked: RerankRequest, texts: list[str], call: PooledCall) -> bytes:
    results: list[Json] = [{"index": i, "relevance_score": score} for i, score in enumerate(_scores(call))]
    results.sort(key=lambda result: -result["relevance_score"])
    results = results[: asked.top_n or len(results)]
    for result in results if asked.return_documents is not False else ():
        result["document"] = {"text": texts[result["index"]]}
    return encode({"id": f"rerank-{secrets.token_hex(16)}", **call.shown(), "results": results})
