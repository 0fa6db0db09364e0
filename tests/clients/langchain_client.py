"""Ask a cluster through langchain-openai: `langchain_client.py URL MODEL`. Runs where that is installed."""

import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

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
