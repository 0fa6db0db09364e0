"""Downloads a file from a package index, and continues a download that was broken off.

What has come so far is a part. The server's name for the file's version (ETag), if it has one, is kept beside the part:
of another version the server sends all. A part is taken for the file only if its digest is the one that the caller
knows.
"""

import html
import os
import re
import sys
from collections.abc import Iterator
from configparser import Error, RawConfigParser
from pathlib import Path

import httpx2
import msgspec

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.home import CHUNK_BYTES, Progress, file_sha256

PYPI = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
SILENCE_S = 60.0  # of a server, after which it is given up

_LINK = re.compile(r'href="([^"#]+)#sha256=([0-9a-f]{64})"')


class _File(msgspec.Struct):
    url: str
    hashes: dict[str, str]


class _Page(msgspec.Struct):
    files: list[_File]


def find_file(project: str, sha256: str) -> httpx2.URL:
    """Return where a package index has a project's file with this digest.

    The indexes are those of pip, by its variables or its files. ConfigError says of each what it answered.
    """
    answers = []
    with _client() as client:
        for index in _indexes():
            page = httpx2.URL(f"{index.rstrip('/')}/{project}/")
            try:
                answer = client.get(page, headers={"Accept": f"{JSON}, text/html;q=0.1"})
                found = answer.is_success and next((link for link, digest in _links(answer) if digest == sha256), None)
            except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError) as error:
                answers.append(f"{_shown(page)}: {error}")
                continue
            if found:
                return answer.url.join(found)
            said = "no such file" if answer.is_success else f"{answer.status_code} {answer.reason_phrase}"
            answers.append(f"{_shown(page)}: {said}")
    raise ConfigError(
        f"{project}: no package index has its file with sha256 {sha256} ({'; '.join(answers)}). Connect to the network "
        "or set PIP_INDEX_URL, or give the path of a model file instead of a name"
    )


def _indexes() -> Iterator[str]:
    files = RawConfigParser(strict=False)
    home = Path(os.path.expanduser("~"))  # as it is, where this user has none
    own = os.environ.get("XDG_CONFIG_HOME") or home / ".config"
    shared = [Path(folder) / "pip" for folder in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    folders = [*shared, Path("/etc"), home / ".pip", Path(own) / "pip", Path(sys.prefix)]
    given = os.environ.get("PIP_CONFIG_FILE", "")
    try:
        files.read([] if given == os.devnull else [*(folder / "pip.conf" for folder in folders), given])
    except (Error, UnicodeDecodeError) as error:
        raise ConfigError(f"pip.conf: {error}") from error
    for name, default in (("index-url", PYPI), ("extra-index-url", "")):
        variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
        section = "download" if files.has_option("download", name) else "global"
        urls = variable or files.get(section, name, fallback=default) or ""
        yield from (url for url in urls.split() if url.startswith("http"))


def _links(page: httpx2.Response) -> Iterator[tuple[str, str | None]]:
    """Yield the files of a page of an index, each with its digest."""
    if page.headers.get("Content-Type", "").startswith(JSON):
        yield from (
            (file.url, file.hashes.get("sha256")) for file in msgspec.json.decode(page.content, type=_Page).files
        )
    else:
        yield from ((html.unescape(link), digest) for link, digest in _LINK.findall(page.text))


def download(url: httpx2.URL, part: Path, sha256: str, report: Progress) -> None:
    """Fill `part` with the file of this digest, of which it may already have the beginning.

    ConfigError if the server fails without having sent anything more, or if the file has another digest; in this case
    the part is removed. OSError if it cannot be written.
    """
    was_begun = _size(part) > 0
    _complete(url, part, report)
    if (found := file_sha256(part)) == sha256:
        return
    discard(part)
    if was_begun:  # with bytes of another file
        download(url, part, sha256, report)
        return
    raise ConfigError(
        f"{_shown(url)}: its sha256 is {found}, and {sha256} is expected. Nothing of it is kept; try again, or set "
        "PIP_INDEX_URL to another index"
    )


def _complete(url: httpx2.URL, part: Path, report: Progress) -> None:
    with _client() as client:
        while True:
            before = _size(part)
            try:
                _continue(client, url, part, report)
                return
            except httpx2.HTTPError as error:
                if _size(part) <= before:
                    kept = f"{part} keeps {_size(part)} bytes, and another run continues from there"
                    raise ConfigError(f"{_shown(url)}: {error or type(error).__name__}; {kept}") from error


def discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version(part).unlink(missing_ok=True)


def _version(part: Path) -> Path:
    """Return the file with the ETag of the file that a part is of."""
    return part.with_name(f"{part.name}.etag")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _continue(client: httpx2.Client, url: httpx2.URL, part: Path, report: Progress) -> None:
    """Ask for what a part lacks, and append it. A part of another version begins anew."""
    start, version = _size(part), _version(part)
    known = {"Range": f"bytes={start}-"} if start else {}
    if start and version.exists():
        known["If-Range"] = version.read_text(encoding="latin-1")
    with client.stream("GET", url, headers={"Accept-Encoding": "identity", **known}) as answer:
        if start and answer.status_code == 416:  # there is no more; the digest decides
            return
        if answer.status_code == 200:
            start = 0
            discard(part)
            etag = answer.headers.get("ETag", "")
            if etag.startswith('"'):  # a weak one may stand for other bytes
                version.write_text(etag, encoding="latin-1")
        elif answer.status_code != 206 or not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise ConfigError(f"{_shown(url)}: the server answered {answer.status_code} {answer.reason_phrase}")
        total = start + int(answer.headers.get("Content-Length", 0))
        with part.open("ab") as file:
            for chunk in answer.iter_raw(CHUNK_BYTES):
                file.write(chunk)
                start += len(chunk)
                report(min(1.0, start / total) if total else 0.0)


def _client() -> httpx2.Client:
    try:
        return httpx2.Client(follow_redirects=True, timeout=SILENCE_S)
    except OSError as error:
        raise ConfigError(f"{error.filename or 'SSL_CERT_FILE'}: {error.strerror or error}") from error


def _shown(url: httpx2.URL) -> httpx2.URL:
    return url.copy_with(userinfo=b"")
