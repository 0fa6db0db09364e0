"""What a process tells of itself: metrics, traces, logs.

Decides nothing, and is called by shells alone. Begin at `metrics.py`, which names every metric.
"""
