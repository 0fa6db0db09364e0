"""POST /v1/rerank and /v1/score against a real router whose workers are fakes: longer documents are better ones."""

from typing import Any

import pytest
from http_door import StartHttp
from router_fakes import LETTERS, MODEL, TOKENIZER, logits_of

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.token_ids import from_wire
from pdserve.router.frontend.openai import scores
from pdserve.text.scoring import INSTRUCTION, score_of

DOCUMENTS = ["a cat", "a cat sat on a mat", "a", "a cat sat"]
ORDER = [1, 3, 0, 2]


def prompt(query: str, document: str, task: str) -> str:
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )


async def test_documents_come_back_the_best_first(start_http: StartHttp) -> None:
    door = await start_http()
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        given = (await door.post(path, model=MODEL, query="cats?", documents=DOCUMENTS, instruction="Find.")).json()
        assert given["id"].startswith("rerank-")
        assert given["model"] == MODEL
        assert [result["index"] for result in given["results"]] == ORDER
        assert [result["document"]["text"] for result in given["results"]] == [DOCUMENTS[place] for place in ORDER]
        texts = [prompt("cats?", document, "Find.") for document in DOCUMENTS]
        ids = [TOKENIZER.encode(text, add_special=False) for text in texts]
        scores = [score_of(*logits_of(ids[place])) for place in ORDER]
        assert [result["relevance_score"] for result in given["results"]] == pytest.approx(scores)
        assert given["usage"]["total_tokens"] == sum(map(len, ids))
    spec = door.router.workers["p0"].prefills[0].spec
    assert TOKENIZER.decode(list(from_wire(spec.token_ids, "token_ids"))) == texts[0]
    words = [LETTERS[24], LETTERS[13]]
    assert spec.sampling.pooling == inference.Pooling(kind=inference.POOLING_KIND_LOGITS, token_ids=words)


async def test_some_results_or_none_of_their_documents(start_http: StartHttp) -> None:
    door = await start_http()
    asked: Any = {"query": "cats?", "documents": [{"text": text} for text in DOCUMENTS], "return_documents": False}
    best = (await door.post("/v1/rerank", **asked, top_n=2)).json()["results"]
    assert [result["index"] for result in best] == ORDER[:2]
    assert all("document" not in result for result in best)
    assert len((await door.post("/v1/rerank", **asked, top_n=0)).json()["results"]) == 4


async def test_scores_keep_the_order_of_pairs(start_http: StartHttp) -> None:
    door = await start_http()
    one = (await door.post("/v1/score", text_1="cats?", text_2=DOCUMENTS)).json()
    pairs = (await door.post("/score", text_1=["cats?"] * 4, text_2=DOCUMENTS)).json()
    assert [each["index"] for each in one["data"]] == [0, 1, 2, 3]
    assert [each["score"] for each in one["data"]] == [each["score"] for each in pairs["data"]]
    assert sorted(range(4), key=lambda place: -one["data"][place]["score"]) == ORDER
    (alone,) = (await door.post("/v1/score", text_1="cats?", text_2="a cat")).json()["data"]
    assert alone["score"] == one["data"][0]["score"]


@pytest.mark.parametrize(
    ("path", "asked", "param", "text"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "it is empty"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents", "0 documents are outside [1, 2048]"),
        ("/v1/rerank", {"query": "q", "documents": ["a", ""]}, "documents[1]", "it is empty"),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b" * 5000]}, "documents[1]", "maximum context length"),
        ("/v1/rerank", {"query": "q", "documents": "a"}, "documents", "valid array"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_chunks_per_doc": 3}, "max_chunks_per_doc", "not cut"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "field required"),
        ("/v1/score", {"text_1": "q", "text_2": []}, "text_2", "0 texts are outside"),
        ("/v1/score", {"text_1": ["q", "r"], "text_2": ["a"] * 3}, "text_1", "as many as the 3 of text_2"),
        ("/v1/score", {"text_1": ["q", ""], "text_2": ["a", "b"]}, "text_1[1]", "it is empty"),
        ("/v1/score", {"text_1": "q", "text_2": "a", "softmax": True}, "softmax", "probabilities"),
    ],
)
async def test_what_is_wrong_with_texts_is_named(
    start_http: StartHttp, path: str, asked: dict[str, object], param: str, text: str
) -> None:
    door = await start_http()
    reply = await door.post(path, **asked)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert text in error["message"]


async def test_a_model_without_the_words_scores_nothing(start_http: StartHttp) -> None:
    door = await start_http(template=None)
    reply = await door.post("/v1/rerank", query="q", documents=["a"])
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert "yes, no, <|im_start|>" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "name"), [("/v1/rerank", "documents[2]"), ("/v1/score", "text_2[2]")])
async def test_prompt_tokens_of_a_call_have_a_limit(
    start_http: StartHttp, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    each = len(TOKENIZER.encode(prompt("q", "a", INSTRUCTION), add_special=False))
    monkeypatch.setattr(scores, "MAX_CALL_TOKENS", 3 * each - 1)
    door = await start_http()
    for count, status in ((2, 200), (3, 400), (9, 400)):
        texts = {"query": "q", "documents": ["a"] * count}
        pairs = {"text_1": "q", "text_2": ["a"] * count}
        reply = await door.post(path, **(texts if path == "/v1/rerank" else pairs))
        assert reply.status_code == status
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", name)
    assert (
        f"the first 3 prompts have {3 * each} tokens, over the limit of {3 * each - 1} for a call" in error["message"]
    )


async def test_a_document_that_is_refused_is_counted_and_a_wrong_model_comes_first(start_http: StartHttp) -> None:
    door = await start_http()
    documents = ["b" * 5000]
    assert (await door.post("/v1/rerank", model="nonsense", query="q", documents=documents)).status_code == 404
    assert (await door.post("/v1/rerank", query="q", documents=documents)).status_code == 400
    shown = (await door.http.get("/metrics")).text
    assert 'status="INVALID_ARGUMENT"' in shown
    assert 'status="NOT_FOUND"' in shown
