"""Start a cluster's processes on this machine and keep them running.

Decides when a process is started again, and reports the end of each to the routers. Begin at `local.py`. Must not know
what the processes do.
"""
