"""The end of a command that could not do what it was asked."""


def only_cause(error: BaseException) -> BaseException:
    """Return what groups of one each hold at last: what a command says while others of its tasks run comes in them."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def in_words(error: BaseException) -> str:
    """Return what went wrong: of an operating system's error the file and why, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
