"""Capacity under virtual time: the router's and the workers' own cores, with a performance profile for an engine.

Answers what a cluster would do with a trace, without the cluster. Begin at `cluster.py`. Must not hold a second copy of
a rule: policies, schedulers and hand-offs are those that serve.
"""
