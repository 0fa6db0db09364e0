"""What can go wrong, by who can fix it."""

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

Kind = TypeVar("Kind", bound=BaseException)

MAX_ECHO_CHARS = 200


class ConfigError(Exception):
    """The operator asked for something impossible; the message names the key. Exit with status 2."""


class CommandError(Exception):
    """Something outside this process failed; the message is for the operator's terminal. Exit with status 1."""


class PeerFault(Enum):
    """What was wrong with a peer's message; metrics count refusals by this."""

    SECRET = "secret"
    PART = "part"  # a caller's certificate is of a process that may not make the call
    VERSION = "version"
    INCARNATION = "incarnation"
    LAYOUT = "layout"
    MOVER = "mover"
    CAPABILITY = "capability"
    ORDER = "order"  # a valid message at the wrong time
    MALFORMED = "malformed"


class ProtocolError(Exception):
    """A peer sent a message that it may not send now. Drop that peer or request, and keep serving."""

    def __init__(self, message: str, refusal: PeerFault = PeerFault.MALFORMED) -> None:
        super().__init__(message)
        self.refusal = refusal


class InvariantError(Exception):
    """Our own bookkeeping disagrees with itself. Stop this process."""


class DeviceError(Exception):
    """The engine's device has failed. Stop this process: only a new process can use the device again."""


class GrammarError(Exception):
    """No token can continue an answer as its grammar demands. Only that answer is affected."""


def first_of(error: BaseException, kind: type[Kind]) -> Kind | None:
    """Return the first error of a kind in a group, at any depth; None if there is none."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, kind) else None
    found = (first_of(each, kind) for each in error.exceptions)
    return next((each for each in found if each is not None), None)


def echo(text: str, show: Callable[[str], str] = str) -> str:
    """Return the beginning of a text that somebody sent, for a message; `show` may quote it."""
    shown = show(text[: MAX_ECHO_CHARS + 1])
    if len(shown) <= MAX_ECHO_CHARS:
        return shown
    return f"{shown[:MAX_ECHO_CHARS]}... ({len(text)} characters)"


EXTRAS = {  # by the imported module
    "torch": "worker",
    "triton": "worker",
    "safetensors": "worker",
    "gguf": "worker",
    "nixl_cu12": "worker",
    "nixl_cu13": "worker",
    "zmq": "worker",
    "ray": "ray",
    "kubernetes": "kubernetes",
}


def not_installed(module: str) -> ConfigError:
    """Return the error for a missing package; it names the extra to install."""
    return ConfigError(f"{module} is not installed, and this needs it: pip install 'pdserve[{EXTRAS[module]}]'")
