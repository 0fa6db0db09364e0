"""Find documents through LlamaIndex: `llama_index_client.py URL MODEL`. Runs where that is installed."""

import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = [
    "Bern is the capital of Switzerland.",
    "Whales are mammals that live in the sea.",
    "Bread is baked from flour, water and salt.",
    "A violin has four strings.",
]
url, model = sys.argv[1:]
embedding = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none", embed_batch_size=3)
index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=embedding)
retriever = index.as_retriever(similarity_top_k=2)
for text in TEXTS:  # a model that generates places equal texts together, and promises no more
    found = retriever.retrieve(text)
    assert [len(found), found[0].text] == [2, text], found
    assert found[0].score > found[1].score, found
