"""Files of requests in OpenAI's batch format, against a server that a test plays."""

import asyncio
import fcntl
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import pytest

from pdserve.base.errors import ConfigError
from pdserve.cli import batch
from pdserve.cli.batch import Tally, check, check_output, run_batch

Answer = Callable[[httpx2.Request], httpx2.Response | Awaitable[httpx2.Response]]
URL = "/v1/chat/completions"


def line(custom_id: str, **changes: object) -> dict[str, object]:
    body = {"model": "m", "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body, **changes}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def read(path: Path) -> dict[str, dict[str, dict[str, object]]]:
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    assert max(Counter(each["custom_id"] for each in lines).values()) == 1
    return {each["custom_id"]: each for each in lines}


def echo(request: httpx2.Request) -> httpx2.Response:
    content = json.loads(request.content)["messages"][0]["content"]
    headers = {"x-request-id": f"req-{content}"}
    return httpx2.Response(200, json={"choices": [{"message": {"content": content.upper()}}]}, headers=headers)


async def sent(source: Path, out: Path, answer: Answer, **pace: int) -> Tally:
    check(source)
    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://server") as http:
        return await run_batch(
            source, out, http, **{"max_concurrency": 64, "max_retries": 20, **pace}, advance=lambda: None
        )


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FIRST_BACKOFF_S", 0.0)


async def test_each_line_has_its_answer_under_its_custom_id(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", *map(line, "abcde")), tmp_path / "out"
    assert await sent(source, out, echo, max_concurrency=2) == Tally(num_done=5)
    results = read(out)
    assert set(results) == set("abcde")
    assert results["b"]["error"] is None
    assert results["b"]["response"] == {
        "status_code": 200,
        "request_id": "req-b",
        "body": {"choices": [{"message": {"content": "B"}}]},
    }


async def test_lines_that_are_no_requests_are_left_out_and_named_where_that_is_asked_for(tmp_path: Path) -> None:
    bad = ("nonsense", line("a"), {"custom_id": ""}, "[1]")
    source, out, errors = write(tmp_path / "in", line("a"), *bad, line("b")), tmp_path / "out", tmp_path / "errors"
    with pytest.raises(ConfigError, match="line 2: no JSON object with a custom_id; line 3: custom_id 'a' is there"):
        check(source)
    assert check(source, errors) == 2
    named = [json.loads(each) for each in errors.read_text().splitlines()]
    assert [each["line"] for each in named] == [2, 3, 4, 5]
    assert named[1]["error"]["message"] == "custom_id 'a' is there twice"
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(echo), base_url="http://server") as http:
        await run_batch(source, out, http, 4, 0, lambda: None)
    assert set(read(out)) == {"a", "b"}
    assert check(write(tmp_path / "good", line("a")), errors) == 1
    assert errors.read_text() == ""


async def test_a_file_of_something_else_is_no_output_and_stays_as_it_is(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"))
    unterminated = tmp_path / "unterminated"
    unterminated.write_text('{"a": 1}')
    for other in (source, write(tmp_path / "other", line("b")), write(tmp_path / "notes", "notes"), unterminated):
        before = other.read_bytes()
        with pytest.raises(ConfigError, match="something else than results"):
            check_output(other, source)
        with pytest.raises(ConfigError, match="something else than results"):
            await sent(source, other, echo)
        assert other.read_bytes() == before


@pytest.mark.parametrize("num_bytes", [0, 1, 30])
async def test_a_run_goes_on_after_one_that_was_cut_short_in_its_first_line(tmp_path: Path, num_bytes: int) -> None:
    source, out = write(tmp_path / "in", line("a")), tmp_path / "out"
    await sent(source, out, echo)
    out.write_bytes(out.read_bytes()[:num_bytes])
    assert await sent(source, out, echo) == Tally(num_done=1)
    assert set(read(out)) == {"a"}


def test_a_server_and_an_authority_that_cannot_be_are_refused_by_their_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--server"):
        batch.client("http://127.0.0.1:99999")
    for authority in (tmp_path / "none", write(tmp_path / "text", "x")):
        with pytest.raises(ConfigError, match=f"--ca-file: {authority}"):
            batch.client("https://127.0.0.1:1", ca_file=authority)


async def test_no_more_requests_are_under_way_than_asked(tmp_path: Path) -> None:
    under_way = most = 0

    async def slow(request: httpx2.Request) -> httpx2.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return echo(request)

    source = write(tmp_path / "in", *(line(str(number)) for number in range(20)))
    await sent(source, tmp_path / "out", slow, max_concurrency=3)
    assert most == 3


async def test_what_a_run_that_was_cut_short_has_written_is_not_sent_again(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", *map(line, "abcd")), tmp_path / "out"
    await sent(write(tmp_path / "some", line("a"), line("b")), out, echo)
    torn = out.read_bytes()[:-20]  # in the middle of the last line
    out.write_bytes(torn)
    asked: list[str] = []

    def note(request: httpx2.Request) -> httpx2.Response:
        asked.append(json.loads(request.content)["messages"][0]["content"])
        return echo(request)

    assert await sent(source, out, note) == Tally(num_done=3, num_skipped=1)
    assert sorted(asked) == ["b", "c", "d"]
    assert set(read(out)) == set("abcd")
    before = out.read_bytes()
    assert await sent(source, out, note) == Tally(num_skipped=4)
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after-ms": "1500", "retry-after": "9"},
        {"retry-after": "1.5"},
        {"retry-after-ms": "0", "retry-after": "1.5"},
    ],
)
async def test_a_server_without_room_is_left_alone_for_as_long_as_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    replies = iter([httpx2.Response(429, headers=headers), httpx2.Response(503)])
    monkeypatch.setattr(asyncio, "sleep", pause)
    tally = await sent(
        write(tmp_path / "in", line("a")), tmp_path / "out", lambda request: next(replies, echo(request))
    )
    assert tally == Tally(num_done=1)
    assert pauses == [1.5, 0.0]


async def test_what_has_found_no_room_is_sent_by_the_next_run(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", *map(line, "abc")), tmp_path / "out"

    def refuse(request: httpx2.Request) -> httpx2.Response:
        content = json.loads(request.content)["messages"][0]["content"]
        match content:
            case "a":
                return echo(request)
            case "b":
                return httpx2.Response(503, json={"error": {"message": "full"}})
        raise httpx2.ConnectError("refused")

    assert await sent(source, out, refuse, max_retries=2) == Tally(num_done=1, num_failed=2)
    results = read(out)
    assert results["b"]["response"]["body"] == {"error": {"message": "full"}}
    assert results["c"]["response"] is None
    assert results["c"]["error"]["code"] == "no_answer"
    assert await sent(source, out, echo) == Tally(num_done=2, num_skipped=1)
    assert all(each["response"]["status_code"] == 200 for each in read(out).values())


async def test_an_answer_that_would_be_the_same_again_is_not_asked_for_again(tmp_path: Path) -> None:
    calls = Counter[str]()

    def refuse(request: httpx2.Request) -> httpx2.Response:
        content = json.loads(request.content)["messages"][0]["content"]
        calls[content] += 1
        headers = {"x-should-retry": "false"} if content == "b" else {}
        return httpx2.Response({"a": 400, "b": 429}[content], json={"error": {"param": "n"}}, headers=headers)

    source, out = write(tmp_path / "in", line("a"), line("b")), tmp_path / "out"
    assert await sent(source, out, refuse) == Tally(num_failed=2)
    assert calls == {"a": 1, "b": 1}
    assert read(out)["a"]["response"]["body"] == {"error": {"param": "n"}}
    assert await sent(source, out, refuse) == Tally(num_failed=2)  # a mistake stays one
    assert calls == {"a": 1, "b": 2}


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_key_or_model_is_not_final(tmp_path: Path, status: int) -> None:
    source, out = write(tmp_path / "in", line("a")), tmp_path / "out"
    assert await sent(source, out, lambda _: httpx2.Response(status, json={})) == Tally(num_failed=1)
    assert await sent(source, out, echo) == Tally(num_done=1)
    assert await sent(source, out, echo) == Tally(num_skipped=1)


@pytest.mark.parametrize("content", ["NaN", '"\\ud800"'])
async def test_a_body_that_cannot_be_sent_is_its_own_lines_mistake(tmp_path: Path, content: str) -> None:
    wrong = json.dumps(line("\ud801", body={"messages": ["CONTENT"]})).replace('"CONTENT"', content)
    source, out = write(tmp_path / "in", wrong, line("b")), tmp_path / "out"
    assert await sent(source, out, echo) == Tally(num_done=1, num_failed=1)
    response = read(out)["\ud801"]["response"]
    assert (response["status_code"], response["body"]["error"]["param"]) == (400, "body")
    assert await sent(source, out, echo) == Tally(num_failed=1, num_skipped=1)


async def test_a_response_that_cannot_be_decoded_is_no_answer(tmp_path: Path) -> None:
    def garble(request: httpx2.Request) -> httpx2.Response:
        if b'"a"' in request.content:
            return httpx2.Response(200, headers={"content-encoding": "gzip"}, content=b"no gzip")
        return echo(request)

    source, out = write(tmp_path / "in", line("a"), line("b")), tmp_path / "out"
    assert await sent(source, out, garble, max_retries=1) == Tally(num_done=1, num_failed=1)
    assert read(out)["a"]["error"]["code"] == "no_answer"


@pytest.mark.parametrize("server", ["localhost:8000", "127.0.0.1:8000", "http://", "http://host:port", ""])
def test_a_server_without_a_scheme_is_refused_up_front(server: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        batch.client(server)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": "GET"}, "method"),
        ({"url": "/v1/moderations"}, "url"),
        ({"body": [1]}, "body"),
        ({"body": {"stream": True}}, "body.stream"),
    ],
)
async def test_a_line_that_cannot_be_sent_has_an_error_in_openais_shape(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    source, out = write(tmp_path / "in", line("a", **changes), line("b")), tmp_path / "out"
    assert await sent(source, out, echo) == Tally(num_done=1, num_failed=1)
    response = read(out)["a"]["response"]
    assert response["status_code"] == 400
    error = response["body"]["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", field, None)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1: no JSON object with a custom_id"),
        ([line("a"), [1]], "line 2: no JSON object"),
        ([line("a"), "", {"custom_id": ""}], "line 3: no JSON object with a custom_id"),
        ([line("a"), line("b"), line("a")], "line 3: custom_id 'a' is there twice"),
        (["[" * 100_000], "line 1"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_with_its_line(tmp_path: Path, lines: list[object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(write(tmp_path / "in", *lines))


async def test_an_output_has_one_run_that_writes_it(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", line("a")), tmp_path / "out"
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run"):
            await sent(source, out, echo)
