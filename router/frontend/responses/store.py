"""The shelf, in a thread of its own: a file may be held by another process, and no stream waits for that."""

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from pdserve.base.errors import ConfigError, echo
from pdserve.net.rpc import PUBLIC_MESSAGE_BYTES
from pdserve.protocol.refusal import Cause, Refused, RefusedError, invalid
from pdserve.router.frontend.backend import KeptCounts
from pdserve.router.frontend.responses.shelf import PRIVATE, Holder, Json, Kind, Limits, Missing, Shelf, TooMuch

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Store:
    """What this process keeps of responses and conversations."""

    def __init__(self, file: Path | None, limits: Limits, owner: str, counts: KeptCounts) -> None:
        """`file`: None keeps it in memory. `owner`: this process's name.

        ConfigError for an unusable file, or one that a running process of that name uses: each would take the other's
        responses for those of an earlier process, which have failed.
        """
        self.limits = limits
        self._counts = counts
        with ExitStack() as failed:
            self._claim = failed.enter_context(os.fdopen(_claim(file, owner), "wb")) if file is not None else None
            self._shelf = Shelf(file, limits, owner, time.time)
            failed.pop_all()
        self._thread = ThreadPoolExecutor(1, "responses")

    async def close(self) -> None:
        """Let what was begun end."""
        await asyncio.to_thread(self._thread.shutdown)
        self._shelf.close()
        if self._claim is not None:
            self._claim.close()

    async def ask(self, method: Callable[Concatenate[Shelf, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a method of the shelf, after those that were called before. RefusedError if the database fails."""
        call = partial(method, self._shelf, *args, **kwargs)
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, call)
            self._counts.num_forgotten = self._shelf.num_forgotten
            return answer
        except sqlite3.Error as error:
            logger.error("responses and conversations cannot be kept: %s", error)
            text = f"responses and conversations cannot be kept ({error}); with store: false none is"
            raise RefusedError(Refused(Cause.INTERNAL, text)) from error

    async def get(self, tenant: str, name: str, kind: Kind, field: str = "id") -> Holder:
        """Return a holder; RefusedError with the field that names it if it is not there."""
        found = await self.ask(Shelf.get, tenant, name, kind)
        if found is None:
            raise not_kept(name, field)
        return found

    async def history(self, tenant: str, name: str, kind: Kind, field: str) -> list[Json]:
        """Return all items up to the end of a holder.

        RefusedError if it, or a response before it, is not there, or they are more than a request may be.
        """
        try:
            return await self.ask(Shelf.history, tenant, name, kind, PUBLIC_MESSAGE_BYTES)
        except TooMuch:
            raise invalid(field, f"what it continues has more than {PUBLIC_MESSAGE_BYTES} bytes") from None
        except Missing as missing:
            raise not_kept(str(missing), field) from None


def not_kept(name: str, field: str = "id") -> RefusedError:
    """Return the error for what is not there: it was never kept, was forgotten or deleted, or is another tenant's."""
    text = f"{field}: {echo(name, repr)} is not kept here, or no more"
    return RefusedError(Refused(Cause.NOT_KEPT, text))


def _claim(file: Path, owner: str) -> int:
    """Lock a process's name beside a file, for as long as the descriptor is open."""
    try:
        descriptor = os.open(
            file.with_name(f"{file.name}.{quote(owner, safe='')}.lock"), os.O_CREAT | os.O_RDWR, PRIVATE
        )
    except OSError as error:
        raise ConfigError(f"responses_file: {file}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"responses_file: {file}: another process named {owner} uses it: {error.strerror}") from error
    return descriptor
