"""The HTTP door: OpenAI's API with what vLLM's clients send besides, on uvicorn. Streams are written without tasks."""
