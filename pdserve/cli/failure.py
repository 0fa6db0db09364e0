"""The end of a command that could not do what it was asked."""


class CommandError(Exception):
    """Something outside went wrong; the message is for the terminal. Exit with status 1."""
