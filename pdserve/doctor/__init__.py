"""Looks for what keeps a machine or a cluster from serving.

Decides which facts are findings, and what would mend them. Begin at `machine.py` and `cluster.py`. Must not change
anything: it gathers facts and reports.
"""
