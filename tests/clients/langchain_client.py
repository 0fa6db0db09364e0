"""Ask a cluster through LangChain's integrations: `langchain_client.py URL MODEL`. Runs where they are installed."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=16, stream_usage=True)
whole = chat.invoke("Name the capital of France.")
assert "Paris" in whole.content, whole
assert whole.usage_metadata["output_tokens"] > 0, whole
streamed = None
for chunk in chat.stream("Name the capital of France."):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.content == whole.content, streamed
assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], streamed
assert len(chat.batch(["Say hello.", "Say goodbye."])) == 2
try:
    chat.invoke("word " * 100_000)
except ContextOverflowError:
    pass
else:
    raise AssertionError("a prompt that is too long was answered")

others = (
    ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=16, use_responses_api=True),
    ChatAnthropic(base_url=url, api_key="none", model=model, temperature=0, max_tokens=16),
)
for other in others:
    assert other.invoke("Name the capital of France.").text == whole.content, other
    assert "".join(chunk.text for chunk in other.stream("Name the capital of France.")) == whole.content, other
embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model=model, check_embedding_ctx_length=False)
(vector,), again = embeddings.embed_documents(["Paris"]), embeddings.embed_query("Paris")
assert max(abs(a - b) for a, b in zip(vector, again, strict=True)) < 1e-3
