"""The routes of the HTTP door besides generation."""

from http_door import StartHttp
from router_fakes import MODEL, TEMPLATE, TOKENIZER

import pdserve
from pdserve.router.frontend.openai.app import MAX_TOKEN_BODY_BYTES


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special=False)


async def test_the_model_is_listed(start_http: StartHttp) -> None:
    door = await start_http()
    (model,) = (await door.client.models.list()).data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "pdserve")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 2048
    assert await door.client.models.retrieve(MODEL) == model
    assert (await door.http.get("/v1/models/")).json() == (await door.http.get("/v1/models")).json()


async def test_text_becomes_tokens_and_text_again(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    found = (await door.post("/tokenize", prompt="hello", return_token_strs=True)).json()
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids("hello"), 5, 4096)
    assert found["token_strs"] == list("hello")
    chat = (await door.post("/tokenize", messages=[{"role": "user", "content": "hi"}])).json()
    assert chat["tokens"] == ids("user: hi\nassistant:")
    assert (await door.post("/tokenize", prompt="")).json()["tokens"] == []
    assert (await door.post("/detokenize", tokens=ids("hello"))).json() == {"prompt": "hello"}
    assert (await door.post("/tokenize")).json()["error"]["param"] == "prompt"
    assert (await door.post("/detokenize", tokens=[0] * 4097)).json()["error"]["param"] == "tokens"
    assert (await door.post("/detokenize", tokens=["x"])).json()["error"]["param"] == "tokens.0"
    assert (await door.post("/detokenize", tokens=[-1])).json()["error"]["param"] == "tokens.0"
    assert (await door.post("/detokenize", tokens=[])).json() == {"prompt": ""}
    for unknown in (TOKENIZER.vocab_size, 2**32 - 1):
        error = (await door.post("/detokenize", tokens=[5, unknown])).json()["error"]
        assert (
            error["message"] == f"tokens: token id {unknown} at position 1 is outside [0, {TOKENIZER.vocab_size - 1}]"
        )
        assert error["param"] == "tokens"
    assert (await door.post("/tokenize", prompt="hello")).json()["token_strs"] is None
    for path in ("/tokenize", "/detokenize"):
        large = await door.post(path, prompt="a" * MAX_TOKEN_BODY_BYTES, tokens=[])
        assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
    info = (await door.http.get("/tokenizer_info")).json()
    assert info["chat_template"] == TEMPLATE


async def test_health_version_and_metrics(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    assert (await door.http.get("/health")).status_code == 200
    assert (await door.http.get("/ready")).status_code == 503
    await door.router.pair()
    assert (await door.http.get("/ready")).status_code == 200
    assert (await door.http.get("/version")).json() == {"version": pdserve.__version__}
    await door.post("/v1/completions", prompt="a", max_tokens=1)
    samples = (await door.http.get("/metrics")).text.splitlines()
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in samples


async def test_the_description_names_every_route_and_field(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    document = (await door.http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize",
        "/tokenizer_info", "/health", "/ready", "/version", "/metrics", "/v1/messages", "/v1/messages/count_tokens",
        "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items", "/v1/conversations",
        "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items",
        "/v1/conversations/{conversation_id}/items/{item_id}", "/v1/embeddings", "/pooling", "/v1/rerank",
        "/v1/score",
    }  # fmt: skip
    schemas = document["components"]["schemas"]
    assert {"messages", "tools", "slo", "max_completion_tokens"} <= set(schemas["ChatRequest"]["properties"])
    assert {"messages", "system", "max_tokens", "stop_sequences"} <= set(schemas["MessagesRequest"]["properties"])
    assert {"input", "instructions", "tools", "store"} <= set(schemas["ResponseRequest"]["properties"])
    assert set(document["paths"]["/v1/responses/{response_id}"]) == {"get", "delete"}
    assert {"prompt", "echo", "suffix"} <= set(schemas["CompletionRequest"]["properties"])
