"""Values, errors and small tools that every room uses.

Decides nothing about serving. Begin at `errors.py` (who can mend which error) and `ids.py` (what processes, attempts
and pages are called). Must not import any other room.
"""
