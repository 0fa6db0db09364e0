"""Structured output: routers check a specification before its request is admitted, workers make token masks of it."""
