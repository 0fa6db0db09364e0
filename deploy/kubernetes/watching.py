"""All pods of a namespace, and then each change, for as long as one asks.

Invariant: applied in order, what is yielded gives the state that the API had at some moment, and a later one each time,
unless the API itself was restored from a backup.
"""

import logging
from collections.abc import AsyncIterator

import msgspec

from pdserve.kubernetes.client import ApiError, Backoff, Client, RefusedError, UnreachableError
from pdserve.kubernetes.objects import Object, Pod, Status
from pdserve.values import value

logger = logging.getLogger(__name__)

GONE = 410  # the API no longer has the version that a watch is to begin at
MAX_FAILURES = 5  # in a row, after which all pods are listed again: the version itself may be what fails


@value
class Listed:
    pods: tuple[Pod, ...]


@value
class Changed:
    pod: Pod
    is_gone: bool  # it was removed; `pod` is what it was at last


class _Line(Object, frozen=True):
    type: str
    object: msgspec.Raw


async def watch(client: Client, path: str) -> AsyncIterator[Listed | Changed]:
    """Yield all pods, then each change, for ever; where changes were missed, all of them again."""
    backoff, version, warning, failures = Backoff(), "", "", 0
    while True:
        error: ApiError | None = None
        try:
            if not version:
                pods, version = await client.pods(path)
                failures = 0
                yield Listed(tuple(pods))
            async for text in client.changes(path, version):
                line, pod = _read(text)
                version = pod.metadata.resource_version or version
                backoff.reset()
                warning, failures = "", 0
                if line != "BOOKMARK":
                    yield Changed(pod, is_gone=line == "DELETED")
        except ApiError as raised:
            error = raised
            failures += 1
            is_gone = isinstance(error, RefusedError) and error.status == GONE
            # An API that was restored from a backup is silent on a version that it has yet to reach.
            if is_gone or isinstance(error, UnreachableError) or failures >= MAX_FAILURES:
                version = ""
            if not is_gone and str(error) != warning:
                warning = str(error)
                logger.warning("%s: changes are not seen: %s", path, error)
        await backoff.wait(error)


def _read(text: bytes) -> tuple[str, Pod]:
    """Return what a line of a watch brings; RefusedError where it ends the watch, or cannot be read."""
    try:
        line = msgspec.json.decode(text, type=_Line)
        if line.type == "ERROR":
            status = msgspec.json.decode(line.object, type=Status)
            raise RefusedError(status.code, status.message)
        return line.type, msgspec.json.decode(line.object, type=Pod)
    except msgspec.MsgspecError as error:
        raise RefusedError(GONE, f"a watch sent something else: {error}") from error
