"""Measure clusters: workloads, objectives, what clients saw, what it adds up to, and experiments on live clusters."""
