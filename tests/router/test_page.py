"""The live page: what it is sent, to whom, and how much of it."""

import asyncio
import json
import re
from collections.abc import Callable, MutableMapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.clock import MonotonicClock
from pdserve.router.frontend import page as page_app
from pdserve.router.frontend.backend import MAX_OF_STAGE, Readiness, State
from pdserve.router.frontend.clients import Clients, new_key
from pdserve.router.frontend.limits import Uses
from pdserve.router.frontend.page import MAX_OF_TENANT, MAX_WATCHERS, Page, difference, visible

STATIC = files("pdserve.router.frontend") / "static"
NAMES = st.text("abc", min_size=1, max_size=2)
STATES = st.dictionaries(NAMES, st.dictionaries(NAMES, st.integers(0, 2), max_size=4), max_size=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_app, "PERIOD_S", 0.005)


def applied(state: State, changes: State) -> State:
    """Return what the page makes of a change."""
    after = {section: dict(entries) for section, entries in state.items()}
    for section, entries in changes.items():
        known = after.setdefault(section, {})
        for name, entry in entries.items():
            if entry is None:
                known.pop(name, None)
            else:
                known[name] = entry
    return after


@given(STATES, STATES)
def test_a_page_that_applies_each_difference_has_the_whole_state(before: State, after: State) -> None:
    shown = applied(before, difference(before, {section: {} for section in before} | after))
    assert {name: entries for name, entries in shown.items() if entries} == {n: e for n, e in after.items() if e}
    assert difference(after, after) == {}


class Router:
    """Shows what a test sets, and counts how often it is asked. What the page needs of a `Backend`."""

    def __init__(self) -> None:
        self.clock = MonotonicClock()
        self.is_live = True
        self.num_asked = 0
        self.was_asked_often = asyncio.Event()
        self.ended: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, dict[str, Any]] = {}
        self.unlisted: dict[str, dict[str, Any]] = {}  # under way too
        self.workers: list[str] = ["p0"]

    def readiness(self) -> Readiness:
        return Readiness(self.is_live, is_ready=True, can_serve=True, max_model_len=None)

    async def live(self) -> State:
        self.num_asked += 1
        if self.num_asked > 5:
            self.was_asked_often.set()
        return {
            "clock": {"unix_time_ms": 1_700_000_000_000, "uptime_ms": 5000},
            "workers": {name: {"role": "prefill"} for name in self.workers},
            "requests": dict(self.requests),
            "ended": dict(self.ended),
        }

    async def live_request(self, name: str) -> dict[str, Any] | None:
        known = {**self.requests, **self.unlisted, **{each["request_id"]: each for each in self.ended.values()}}
        return known.get(name)

    def end(self, request_id: str, tenant: str = "") -> None:
        self.ended[str(len(self.ended) + 1)] = {"request_id": request_id, "tenant": tenant, "ledger": {"ttft_ms": 7}}


class Visit:
    """One HTTP request to the page, and what came of it."""

    def __init__(self, page: Page, path: str, **headers: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.news = asyncio.Condition()
        self.leaves = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        shown = {"host": "127.0.0.1:8000", **headers}
        raw = [(name.encode(), value.encode()) for name, value in shown.items()]
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "headers": raw,
            "query_string": b"",
            "http_version": "1.1",
        }
        self.task = asyncio.create_task(page.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.reads.wait()
        async with self.news:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            self.body += message.get("body", b"")
            self.news.notify_all()

    @property
    def events(self) -> list[tuple[str, State]]:
        blocks = [block.split("\n") for block in self.body.decode().split("\n\n") if block]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]

    @property
    def state(self) -> State:
        shown: State = {}
        for _, changes in self.events:
            shown = applied(shown, changes)
        return shown

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(10), self.news:
            await self.news.wait_for(lambda: bool(holds()))

    async def done(self) -> "Visit":
        async with asyncio.timeout(10):
            await self.task
        return self

    async def leave(self) -> None:
        self.leaves.set()
        await self.done()


def page_of(router: Router, keys: Path | None = None) -> Page:
    return Page(router, Clients(keys, Uses(router.clock)))


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file with a key each of two tenants; and the headers that show them."""
    shown, lines = {}, ["tenants:"]
    for tenant in ("a", "b"):
        key, digest = new_key()
        shown[tenant] = f"Bearer {key}"
        lines.append(f"  {tenant}: {{keys: [{{id: k, sha256: {digest}}}]}}")
    path = tmp_path / "keys.yaml"
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return path, shown


# ---- files


async def test_the_page_is_served_with_a_policy_that_allows_no_script_of_elsewhere() -> None:
    found = await Visit(page_of(Router()), "/").done()
    assert (found.status, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = found.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    again = await Visit(page_of(Router()), "/", **{"if-none-match": found.headers["etag"]}).done()
    assert (again.status, again.body) == (304, b"")


def test_the_page_needs_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bstyle=|\son[a-z]+=", html)
    names = {file.name for file in STATIC.iterdir()}
    for file in STATIC.iterdir():
        text = file.read_text()
        assert set(re.findall(r'"/page/([\w.-]+\.\w+)"', text)) <= names, file.name
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text), file.name
        assert "innerHTML" not in text


async def test_what_is_not_there_is_not_found() -> None:
    for path in ("/page/app.py", "/page/..%2fapp.py", "/page/requests/00"):
        assert (await Visit(page_of(Router()), path).done()).status == 404


# ---- events


async def test_a_snapshot_comes_first_and_then_what_has_changed() -> None:
    router = Router()
    router.end("11")
    visit = Visit(page_of(router), "/page/events")
    await visit.until(lambda: len(visit.events) == 1)
    assert visit.headers["content-type"] == "text/event-stream"
    router.end("22")
    router.workers = ["p0", "p1"]
    await visit.until(lambda: "p1" in visit.state["workers"])
    router.workers = ["p1"]
    await visit.until(lambda: "p0" not in visit.state["workers"])
    await visit.leave()
    assert [name for name, _ in visit.events] == ["snapshot", "change", "change"]
    assert visit.events[0][1]["clock"] == {"unix_time_ms": 1_700_000_000_000, "uptime_ms": 5000}
    assert list(visit.events[1][1]["ended"]) == ["2"]
    assert visit.events[2][1] == {"workers": {"p0": None}}


async def test_nothing_is_asked_while_nobody_watches_and_watchers_share_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_app, "PERIOD_S", 60.0)
    router = Router()
    page = page_of(router)
    await Visit(page, "/").done()
    assert router.num_asked == 0
    visits = [Visit(page, "/page/events") for _ in range(5)]
    for visit in visits:
        await visit.until(lambda visit=visit: visit.events)
    assert router.num_asked == 1
    for visit in visits:
        await visit.leave()
    assert page.num_watchers == 0


async def test_a_watcher_is_sent_something_each_pulse_and_nothing_else_where_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router()
    monkeypatch.setattr(page_app, "PULSE_S", 60.0)
    visit = Visit(page_of(router), "/page/events")
    await visit.until(lambda: visit.events)
    async with asyncio.timeout(10):
        await router.was_asked_often.wait()
    assert len(visit.events) == 1
    monkeypatch.setattr(page_app, "PULSE_S", 0.0)
    await visit.until(lambda: len(visit.events) > 3)
    await visit.leave()
    assert visit.events[1:4] == [("change", {})] * 3


async def test_no_more_watchers_are_taken_than_there_may_be() -> None:
    page = page_of(Router())
    visits = [Visit(page, "/page/events") for _ in range(MAX_WATCHERS)]
    for visit in visits:
        await visit.until(lambda visit=visit: visit.events)
    assert (await Visit(page, "/page/events").done()).status == 503
    await visits[0].leave()
    late = Visit(page, "/page/events")
    await late.until(lambda: late.events)
    for visit in (*visits[1:], late):
        await visit.leave()


async def test_one_tenant_does_not_take_all_the_watchers_that_there_may_be(keys: tuple[Path, dict[str, str]]) -> None:
    page = page_of(Router(), keys[0])
    visits = [Visit(page, "/page/events", authorization=keys[1]["a"]) for _ in range(MAX_OF_TENANT)]
    for visit in visits:
        await visit.until(lambda visit=visit: visit.events)
    assert (await Visit(page, "/page/events", authorization=keys[1]["a"]).done()).status == 503
    visits.append(Visit(page, "/page/events", authorization=keys[1]["b"]))
    await visits[-1].until(lambda: visits[-1].events)
    for visit in visits:
        await visit.leave()
    assert page.num_watchers == 0


async def test_a_request_that_is_not_in_the_list_has_its_timeline() -> None:
    router = Router()
    router.unlisted = {"55": {"tenant": "", "stage": "decode"}}
    found = await Visit(page_of(router), "/page/requests/55").done()
    assert (found.status, json.loads(found.body)["stage"]) == (200, "decode")


def test_of_each_stage_a_page_gets_the_newest_requests() -> None:
    stages = ("queue", "decode")
    requests = {str(i): {"stage": stages[i % 2], "tenant": f"{i % 5}"} for i in range(100)}
    shown = visible({"requests": requests, "ended": {}}, None)
    assert list(shown["requests"]) == [str(i) for i in range(100 - 2 * MAX_OF_STAGE, 100)]


async def test_a_watcher_that_reads_slowly_gets_the_latest_state_and_none_of_those_before_it() -> None:
    router = Router()
    page = page_of(router)
    visit, other = Visit(page, "/page/events"), Visit(page, "/page/events")
    await visit.until(lambda: visit.events)
    visit.reads.clear()
    for number in range(10):
        router.workers = [f"w{number}"]
        await other.until(lambda number=number: other.events and list(other.state["workers"]) == [f"w{number}"])
    visit.reads.set()
    await visit.until(lambda: list(visit.state["workers"]) == ["w9"])
    await visit.leave()
    await other.leave()
    assert len(visit.events) <= 3


async def test_a_router_that_shuts_down_ends_the_streams() -> None:
    router = Router()
    visit = Visit(page_of(router), "/page/events")
    await visit.until(lambda: visit.events)
    router.is_live = False
    await visit.done()


# ---- who may see what


async def test_without_a_key_where_keys_are_asked_for_only_files_are_served(keys: tuple[Path, dict[str, str]]) -> None:
    router = Router()
    page = page_of(router, keys[0])
    assert (await Visit(page, "/").done()).status == 200
    for path in ("/page/events", "/page/requests/11"):
        for headers in ({}, {"authorization": "Bearer pds_wrong"}):
            refused = await Visit(page, path, **headers).done()
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert router.num_asked == 0


async def test_a_tenant_sees_its_own_requests_alone(keys: tuple[Path, dict[str, str]]) -> None:
    router = Router()
    router.end("11", "a")
    router.end("22", "b")
    router.requests = {"33": {"tenant": "a", "stage": "queue"}, "44": {"tenant": "b", "stage": "queue"}}
    page = page_of(router, keys[0])
    for tenant, ended, running in (("a", "11", "33"), ("b", "22", "44")):
        headers = {"authorization": keys[1][tenant]}
        visit = Visit(page, "/page/events", **headers)
        await visit.until(lambda visit=visit: visit.events)
        await visit.leave()
        (shown,) = visit.state["ended"].values()
        assert shown["request_id"] == ended
        assert list(visit.state["requests"]) == [running]
        statuses = {
            each: (await Visit(page, f"/page/requests/{each}", **headers).done()).status
            for each in ("11", "22", "33", "44")
        }
        assert statuses == {each: 200 if each in (ended, running) else 404 for each in statuses}


async def test_a_stream_ends_when_its_key_is_taken_away(keys: tuple[Path, dict[str, str]]) -> None:
    path, shown = keys
    page = page_of(Router(), path)
    visit = Visit(page, "/page/events", authorization=shown["a"])
    await visit.until(lambda: visit.events)
    path.write_text("tenants: {}")
    await visit.done()
    assert page.num_watchers == 0
