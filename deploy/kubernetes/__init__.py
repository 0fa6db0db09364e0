"""Kubernetes: its API, the leader among autoscalers, and the watcher of pods that reports ended processes.

Decides when a pod's process has provably ended (`ends.py`), and who leads. Begin at `client.py`. Must not decide how
many replicas there are.
"""
