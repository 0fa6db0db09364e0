"""A server of files over HTTP with ranges and versions, which counts what it is asked for and can fail on purpose.

It is a package index, too: /simple/PROJECT/ links to all files of the server.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Asked:
    path: str
    range: str | None
    if_range: str | None


@dataclass
class FileServer:
    """What it serves and how, and what it was asked for; tests change it while it runs."""

    files: dict[str, bytes] = field(default_factory=dict)  # by their paths
    digests: dict[str, str] = field(default_factory=dict)  # in the index, where it shall name another one
    has_ranges: bool = True
    etag: str | None = '"{}"'  # with the file's digest in it
    stall_after: int | None = None  # bytes of an answer, after which nothing more comes until `go_on`
    cut_after: int | None = None  # bytes of an answer, after which the connection ends
    asked: list[Asked] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    def of(self, path: str) -> list[Asked]:
        return [each for each in self.asked if each.path == path]

    def index(self) -> bytes:
        lines = (
            f'<a href="{path}#sha256={self.digests.get(path, hashlib.sha256(content).hexdigest())}">{path[7:]}</a>'
            for path, content in self.files.items()
        )
        return f"<!DOCTYPE html><html><body>{'<br>'.join(lines)}</body></html>".encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        shared = self.server.shared
        if self.path.startswith("/simple/"):
            self._answer(200, {"Content-Type": "text/html"}, shared.index())
            return
        asked = Asked(self.path, self.headers["Range"], self.headers["If-Range"])
        shared.asked.append(asked)
        content = shared.files.get(self.path)
        if content is None:
            self._answer(404, {}, b"")
            return
        etag = shared.etag and shared.etag.format(hashlib.sha256(content).hexdigest()[:16])
        headers = {"ETag": etag} if etag else {}
        status, start = 200, 0
        if shared.has_ranges and asked.range and asked.if_range in (None, etag):
            status, start = 206, int(asked.range.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if start >= len(content):
            self._answer(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
            return
        self._answer(status, headers, content[start:], may_fail=True)

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, may_fail: bool = False) -> None:
        shared = self.server.shared
        self.send_response(status)
        for name, shown in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, shown)
        self.end_headers()
        limit = min(
            (each for each in (shared.stall_after, shared.cut_after) if may_fail and each is not None), default=None
        )
        self.wfile.write(body[:limit])
        if limit is None:
            return
        self.wfile.flush()
        if shared.stall_after is not None:
            shared.stalled.set()
            shared.go_on.wait(60)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, shared: FileServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.shared = shared

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients are killed while it answers."""


@contextmanager
def file_server() -> Iterator[FileServer]:
    shared = FileServer()
    server = _Server(shared)
    shared.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield shared
    finally:
        shared.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
