"""Kubernetes: its API, the leader among autoscalers, and the watcher of pods that reports ended processes."""
