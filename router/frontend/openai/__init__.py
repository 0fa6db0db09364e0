"""The HTTP endpoint: OpenAI's API, with vLLM's additions, on uvicorn. Streams are written without tasks."""
