"""The `pdserve` command.

Decides what a command line means. Begin at `app.py`. Must not do what a command does: each calls the room that does.
"""
