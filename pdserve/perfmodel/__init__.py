"""How long engine steps and transfers take: measured profiles, and models that learn from what workers report.

Decides what is believed of a device's speed. Begin at `model.py`. Must not know of requests: routers, planner and
autoscaler ask it for seconds.
"""
