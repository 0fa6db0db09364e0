"""Structured output: what an answer has to match.

Decides which specifications are accepted, and which tokens may follow. Begin at `matching.py`; routers check a
specification in a process of its own (`checker.py`) before they admit its request. Must not know of models.
"""
