"""Keeps each pool at the size that its policy and its demand ask for.

Decides how many replicas of each pool there are to be, and which worker takes which role. Begin at `policy.py`, which
is pure; `loop.py` observes, asks it, and acts. Must not know how a replica is started: an `Actuator` does that.
"""
