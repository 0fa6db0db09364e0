"""Runs a file of requests in OpenAI's batch format against an OpenAI server, and writes a file of results.

Invariant: the output has at most one line for each `custom_id`, and each line is complete. A run that was cut short is
continued by the next one. The next run also sends again what failed for want of a server, of room, or of the right key
or model.
"""

import asyncio
import fcntl
import json
import random
import secrets
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2

from pdserve.base.errors import ConfigError
from pdserve.base.files import write_atomically

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
BUSY = frozenset((408, 409, 429, 500, 502, 503, 504))  # after these, the same request may succeed
NOT_FINAL = BUSY | {401, 403, 404}  # the next run may succeed, with another key, server or model
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 300.0
ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S = 1200.0, 10.0  # an answer may take longer than a router's longest deadline
MAX_SHOWN = 5  # mistakes of a file that an error lists
MAX_PORT = 65535
RESULT_BEGINS = b'{"id": "batch_req_'

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Item:
    custom_id: str
    url: str
    content: bytes  # of the request
    mistake: str = ""  # why the request is not sent


@dataclass(slots=True)
class Tally:
    num_done: int = 0
    num_failed: int = 0  # in this run, or finally in an earlier one
    num_skipped: int = 0  # answered in an earlier run


def client(server: str, api_key: str = "", ca_file: Path | None = None) -> httpx2.AsyncClient:
    """Return a client of a server, http://host:port; ConfigError if that is no URL."""
    try:
        url = httpx2.URL(server)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--server: {server!r} is no URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > MAX_PORT:
        raise ConfigError(f"--server: {server!r} is no URL of the form http://host:port")
    try:
        trusted = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # the base of ssl's errors
        raise ConfigError(f"--ca-file: {ca_file} holds no certificates: {error.strerror or error}") from error
    return httpx2.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        verify=trusted,
        timeout=httpx2.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None),
    )


async def run_batch(
    source: Path,
    out: Path,
    http: httpx2.AsyncClient,
    max_concurrency: int,
    max_retries: int,
    advance: Callable[[], None],
) -> Tally:
    """Send the requests of a checked file that have no result in the output; return counts of all lines.

    `advance` is called for each line. ConfigError if another run writes the output.
    """
    tally = Tally()

    def unanswered(known: Mapping[str, bool]) -> Iterator[Item]:
        for item in items(source):
            is_answered = known.get(item.custom_id)
            if is_answered is None:
                yield item
                continue
            tally.num_skipped += is_answered
            tally.num_failed += not is_answered
            advance()

    with _results(source, out) as (file, known):
        waiting = unanswered(known)

        async def work() -> None:
            for item in waiting:
                line = await _result(item, http, max_retries)
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                tally.num_done += _is_answered(line)
                tally.num_failed += not _is_answered(line)
                advance()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(max_concurrency):
                tasks.create_task(work())
    return tally


# ---- the input


def check(source: Path, bad_lines: Path | None = None) -> int:
    """Return how many requests a file has.

    ConfigError names lines that are no requests, or duplicates. With `bad_lines`, all of these are named in that file
    instead, a JSON object on each line, and left out.
    """
    num_requests = 0
    mistakes: list[Json] = []
    try:
        for number, _, mistake in _lines(source):
            if not mistake:
                num_requests += 1
                continue
            mistakes.append({"line": number, "error": {"message": mistake}})
            if bad_lines is None and len(mistakes) == MAX_SHOWN:
                break
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    if bad_lines is not None:
        write_atomically(bad_lines, "".join(json.dumps(each) + "\n" for each in mistakes))
    elif mistakes:
        shown = "; ".join(f"line {each['line']}: {each['error']['message']}" for each in mistakes)
        raise ConfigError(f"{source}: {shown}")
    return num_requests


def _lines(source: Path) -> Iterator[tuple[int, Json, str]]:
    """Yield the lines of a file that are not empty: number, object, and why it is no request, if it is none."""
    seen: set[str] = set()
    with source.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            line = _object(raw) or {}
            custom_id = line.get("custom_id")
            if not isinstance(custom_id, str) or not custom_id:
                yield number, line, "no JSON object with a custom_id"
            elif custom_id in seen:
                yield number, line, f"custom_id {custom_id!r} is there twice"
            else:
                seen.add(custom_id)
                yield number, line, ""


def _object(raw: bytes) -> Json | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def items(source: Path) -> Iterator[Item]:
    """Yield the requests of a checked file, in order."""
    for _, line, mistake in _lines(source):
        if not mistake:
            yield _item(line)


def _item(line: Json) -> Item:
    custom_id, url, body = str(line["custom_id"]), line.get("url"), line.get("body")
    content, mistake = b"", ""
    if line.get("method") != "POST":
        mistake = f"method: {line.get('method')!r} is not POST"
    elif url not in URLS:
        mistake = f"url: {url!r} is none of {', '.join(URLS)}"
    elif not isinstance(body, dict):
        mistake = "body: not an object"
    elif body.get("stream"):
        mistake = "body.stream: results of a batch are not streamed"
    else:
        try:
            content = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            mistake = f"body: it cannot be sent as JSON: {error}"
    return Item(custom_id, str(url), content, mistake)


# ---- the output


@contextmanager
def _results(source: Path, out: Path) -> Iterator[tuple[IO[bytes], Mapping[str, bool]]]:
    """Open the output for this run only, with the final results of earlier runs, each once, and nothing else.

    Yields the file, open for appending, and for each id in it whether the request was answered. ConfigError if the file
    holds something else; then it is left unchanged.
    """
    out = out.resolve()  # a link stays a link
    known: dict[str, bool] = {}
    with _opened(out) as before:  # both are locked until the end
        _check_results(before, out, source)
        with _opened(out.with_name(f".{out.name}.tmp")) as file:
            file.truncate()
            for raw in before:
                line = _final(raw)
                if line is not None and line["custom_id"] not in known:
                    known[str(line["custom_id"])] = _is_answered(line)
                    file.write(raw)
            file.flush()
            Path(file.name).replace(out)
            yield file, known


def check_output(out: Path, source: Path) -> None:
    """Raise ConfigError if the output exists and may not be replaced."""
    if out.exists():
        with _opened(out) as file:
            _check_results(file, out, source)


def _check_results(file: IO[bytes], path: Path, source: Path) -> None:
    """Raise ConfigError if a file does not begin with a result: its content would be lost."""
    raw = file.readline()
    if raw.endswith(b"\n"):
        line = _object(raw)
        is_ours = line is not None and "response" in line
    else:  # the run that wrote it was cut short, perhaps at once
        is_ours = raw.startswith(RESULT_BEGINS[: len(raw)])
    if path.samefile(source) or not is_ours:
        raise ConfigError(f"--output: {path} is there, and holds something else than results")
    file.seek(0)


def _opened(path: Path) -> IO[bytes]:
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(f"--output: cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"--output: another run writes {path}") from error
    file.seek(0)
    return file


def _final(raw: bytes) -> Json | None:
    """Return a line of the output if it is a final result."""
    line = _object(raw) if raw.endswith(b"\n") else None
    if line is None or _status(line) in NOT_FINAL or not isinstance(_status(line), int):
        return None
    return line if isinstance(line.get("custom_id"), str) else None


def _is_answered(line: Json) -> bool:
    return _status(line) == httpx2.codes.OK


def _status(line: Json) -> object:
    response = line.get("response")
    return response.get("status_code") if isinstance(response, dict) else None


# ---- one request

_HEADERS = {"content-type": "application/json"}


async def _result(item: Item, http: httpx2.AsyncClient, max_retries: int) -> Json:
    """Return a request's line of the output, whether it was answered or not."""
    if item.mistake:
        error = {"message": item.mistake, "type": "invalid_request_error", "param": item.mistake.partition(":")[0]}
        return _line(item, {"status_code": 400, "request_id": "", "body": {"error": {**error, "code": None}}})
    for retry in range(max_retries + 1):
        is_last = retry == max_retries
        try:
            response = await http.post(item.url, content=item.content, headers=_HEADERS)
        except (httpx2.RequestError, OSError) as error:
            if is_last:
                return _line(item, None, {"code": "no_answer", "message": f"{type(error).__name__}: {error}"})
            await asyncio.sleep(_backoff_s(retry))
            continue
        if response.status_code not in BUSY or response.headers.get("x-should-retry") == "false" or is_last:
            return _line(item, _response(response))
        await asyncio.sleep(_retry_after_s(response.headers) or _backoff_s(retry))
    raise AssertionError("the last try returns")


def _response(response: httpx2.Response) -> Json:
    try:
        body: object = response.json()
    except (ValueError, RecursionError):
        message = response.text[:1000]
        body = {"error": {"message": message, "type": "invalid_response", "param": None, "code": None}}
    request_id = response.headers.get("x-request-id", "")
    return {"status_code": response.status_code, "request_id": request_id, "body": body}


def _line(item: Item, response: Json | None, error: Json | None = None) -> Json:
    name = f"batch_req_{secrets.token_hex(12)}"
    return {"id": name, "custom_id": item.custom_id, "response": response, "error": error}


def _backoff_s(retry: int) -> float:
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0**retry) * random.uniform(0.5, 1.0)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks clients to wait; None if it asks for none, or too many."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            asked_s = float(headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0 < asked_s <= MAX_RETRY_AFTER_S:  # after 0 s all tries would be used up at once
            return asked_s
    return None
