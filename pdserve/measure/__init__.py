"""Measure clusters from outside: workloads, objectives, what clients saw, what it adds up to.

Decides what counts as attained. Begin at `workload.py`; each measurement of `pdserve bench` is a file. Must not reach
into a cluster but by its public endpoints and its status.
"""
