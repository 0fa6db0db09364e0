"""Everything between clients and a router's core: endpoints, checks, tokens, text, and limits of tenants.

Decides which requests are well-formed and within a tenant's limits. Begin at `intake.py`. Must not know of workers: it
speaks to a `Backend`.
"""
