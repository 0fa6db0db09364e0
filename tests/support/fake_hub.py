"""A Hugging Face hub with one repository, for tests."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub.utils.sha import git_hash

REPOSITORY = "acme/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What it serves, and what it was asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.sent: dict[str, bytes] = {}  # other bytes than those that it says a file has
        self.commit = COMMIT
        self.fetched: list[str] = []
        self.address = ""
        self.stalls_at: str | None = None  # a file of which it sends half, until `go_on`
        self.stalled, self.go_on = threading.Event(), threading.Event()

    def reply(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        path = path.partition("?")[0]
        api = f"/api/models/{REPOSITORY}"
        if path.startswith(api):
            kind, _, revision = path.removeprefix(f"{api}/").partition("/")
            if path != api and revision not in ("main", "v1", self.commit):
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            return 200, json.dumps(self._tree() if kind == "tree" else self._info()).encode(), {}
        start = f"/{REPOSITORY}/resolve/{self.commit}/"
        name = path.removeprefix(start)
        if path.startswith(start) and name in self.files:
            headers = {"ETag": f'"{_digest(name, self.files[name])}"', "X-Repo-Commit": self.commit}
            return 200, self.sent.get(name, self.files[name]), headers
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def _info(self) -> dict[str, object]:
        return {"id": REPOSITORY, "sha": self.commit, "siblings": [{"rfilename": name} for name in self.files]}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
            | (
                {"lfs": {"oid": _digest(name, content), "size": len(content), "pointerSize": 1}}
                if _is_large(name)
                else {}
            )
            for name, content in self.files.items()
        ]


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def _digest(name: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if _is_large(name) else git_hash(content)


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
            if not is_wanted:
                return
            name = self.path.partition(f"/{hub.commit}/")[2]
            if name == hub.stalls_at:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                hub.stalled.set()
                hub.go_on.wait(60)
                return
            self.wfile.write(content)
            if status == 200 and "/resolve/" in self.path:
                hub.fetched.append(name)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign] - clients are killed while it answers
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
