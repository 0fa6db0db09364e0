"""A Hugging Face hub with one repository, for tests."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPOSITORY = "acme/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What it serves, and what it was asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.fetched: list[str] = []
        self.address = ""

    def reply(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        path = path.partition("?")[0]
        api = f"/api/models/{REPOSITORY}"
        if path.startswith(api):
            kind, _, revision = path.removeprefix(f"{api}/").partition("/")
            if revision not in ("main", "v1", COMMIT):
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            return 200, json.dumps(self._tree() if kind == "tree" else self._info()).encode(), {}
        start = f"/{REPOSITORY}/resolve/{COMMIT}/"
        name = path.removeprefix(start)
        if path.startswith(start) and name in self.files:
            content = self.files[name]
            return 200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def _info(self) -> dict[str, object]:
        return {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]


@contextmanager
def fake_hub(files: Mapping[str, bytes]) -> Iterator[FakeHub]:
    hub = FakeHub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(is_wanted=False)

        def do_GET(self) -> None:
            self._answer(is_wanted=True)

        def _answer(self, *, is_wanted: bool) -> None:
            status, content, headers = hub.reply(self.path)
            self.send_response(status)
            for name, shown in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, shown)
            self.end_headers()
            if is_wanted:
                self.wfile.write(content)
                if status == 200 and "/resolve/" in self.path:
                    hub.fetched.append(self.path.partition(f"/{COMMIT}/")[2])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
