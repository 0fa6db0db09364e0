"""What is kept of responses and conversations, for how long, and what is forgotten first."""

import sqlite3
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_answers import Json

from pdserve.base.errors import ConfigError
from pdserve.router.frontend.backend import KeptCounts
from pdserve.router.frontend.responses.shelf import Entry, Kind, Limits, Missing, Shelf, TooMuch
from pdserve.router.frontend.responses.store import Store

RESPONSE, CONVERSATION = Kind.RESPONSE, Kind.CONVERSATION
LIMITS = Limits(max_num=3, max_bytes=1 << 20, ttl_s=100.0)


class World:
    """A shelf, and the time of its clock."""

    def __init__(self, limits: Limits = LIMITS, file: Path | None = None, owner: str = "a") -> None:
        self.now_s = 1000.0
        self.shelf = Shelf(file, limits, owner, lambda: self.now_s)

    def put(self, name: str, previous: str = "", tenant: str = "", size: int = 1, **members: str) -> None:
        self.now_s += 1.0
        entry = Entry(response(name), [item(f"{name}-in", size)], [item(f"{name}-out")], previous, **members)
        self.shelf.put(tenant, RESPONSE, entry)

    def kept(self, *names: str, tenant: str = "") -> str:
        return "".join(name for name in names if self.shelf.get(tenant, name, RESPONSE) is not None)


def response(name: str, status: str = "completed") -> Json:
    return {"id": name, "status": status}


def item(name: str, size: int = 1) -> Json:
    return {"id": name, "text": "x" * size}


def ids(items: list[Json]) -> list[str]:
    return [each["id"] for each in items]


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    world = World()
    for name in "abc":
        world.put(name)
    world.now_s += 1.0
    world.shelf.history("", "a", RESPONSE, 10**6)
    world.put("d")
    assert world.kept(*"abcd") == "acd"
    world.put("e", tenant="other")
    assert world.kept(*"abcd") == "acd"


def test_a_chain_of_more_bytes_than_may_be_continued_is_not_read() -> None:
    world = World()
    world.put("a", size=1000)
    world.put("b", "a", size=1000)
    assert len(world.shelf.history("", "b", RESPONSE, 3000)) == 4
    with pytest.raises(TooMuch):
        world.shelf.history("", "b", RESPONSE, 2000)


def test_a_response_that_its_process_never_ended_is_forgotten_like_others() -> None:
    world = World()
    for name in "ab":
        world.shelf.put("", RESPONSE, Entry(response(name, "in_progress")), running_s=5.0)
    world.now_s += 10.0
    for name in "cde":
        world.put(name)
    assert world.kept(*"abcde") == "cde"


def test_continuing_a_response_uses_all_before_it() -> None:
    world = World()
    world.put("a")
    world.put("b", previous="a")
    world.put("x")
    world.now_s += 1.0
    assert ids(world.shelf.history("", "b", RESPONSE, 10**6)) == ["a-in", "a-out", "b-in", "b-out"]
    world.put("c", previous="b")
    assert world.kept(*"abxc") == "abc"
    world.put("d", previous="c")
    world.shelf.delete("", "b", RESPONSE)
    with pytest.raises(Missing, match="b"):
        world.shelf.history("", "d", RESPONSE, 10**6)


def test_bytes_are_bounded_but_what_was_put_last_stays() -> None:
    world = World(Limits(100, 10_000, 100.0))
    for name in "abcdef":
        world.put(name, size=3000)
    assert world.kept(*"abcdef") == "def"
    world.put("g", size=20_000)
    assert world.kept(*"abcdefg") == "g"
    assert world.shelf.num_forgotten == 6
    assert world.shelf.counts()[0] == 1


def test_what_is_not_used_for_long_is_forgotten() -> None:
    world = World()
    world.put("a")
    world.now_s += 99.0
    assert world.kept("a") == "a"
    world.now_s += 2.0
    assert world.kept("a") == ""
    assert world.shelf.item("", "a-in") is None
    world.put("b", tenant="other")
    assert world.shelf.counts()[0] == 1


def test_a_conversation_grows_and_loses_single_items() -> None:
    world = World()
    world.shelf.put("", CONVERSATION, Entry(response("c"), [item("1")]))
    assert world.shelf.append("", "c", [item("2"), item("3")])
    world.put("r", conversation="c")
    assert ids(world.shelf.items("", "c")) == ["1", "2", "3", "r-in", "r-out"]
    before = world.shelf.counts()[1]
    assert world.shelf.delete_item("", "c", "2") is not None
    assert world.shelf.counts()[1] < before
    assert world.shelf.delete_item("", "c", "2") is None
    assert world.shelf.delete_item("", "r", "r-in") is None  # responses stay as they are
    assert ids(world.shelf.history("", "c", CONVERSATION, 10**6)) == ["1", "3", "r-in", "r-out"]
    assert msgspec.json.decode(world.shelf.item("", "3", "c") or b"") == item("3")
    assert world.shelf.item("", "3", "r") is None
    assert not world.shelf.append("", "r", [item("4")])
    assert world.shelf.delete("", "c", CONVERSATION)
    world.put("s", conversation="c")
    assert world.kept(*"rs") == "rs"
    while world.shelf.counts()[0]:
        assert world.shelf.delete("", "r", RESPONSE) or world.shelf.delete("", "s", RESPONSE)
    assert world.shelf.counts() == (0, 0)


def test_a_response_in_the_background_ends_once() -> None:
    world = World()
    for name in "ab":
        world.shelf.put("", RESPONSE, Entry(response(name, "queued"), [item("in")]), 50.0)
    done = Entry(response("a"), [item("in")], [item("out")])
    assert world.shelf.end("", done)
    assert not world.shelf.end("", Entry(response("a", "failed")))
    assert ids(world.shelf.history("", "a", RESPONSE, 10**6)) == ["in", "out"]
    cancelled = world.shelf.cancel("", "b")
    assert cancelled is not None
    assert (cancelled.body["status"], cancelled.is_running) == ("cancelled", False)
    assert not world.shelf.end("", Entry(response("b")))
    assert world.shelf.cancel("", "b") == cancelled
    assert world.shelf.cancel("", "c") is None
    for name in "xyz":  # what is being computed is not forgotten, however much there is
        world.shelf.put("", RESPONSE, Entry(response(name, "queued")), 50.0)
    world.put("d")
    assert world.kept(*"abdxyz") == "dxyz"
    world.now_s += 51.0
    lost = world.shelf.get("", "x", RESPONSE)
    assert lost is not None
    assert (lost.body["status"], lost.body["error"]["code"]) == ("failed", "server_error")
    assert not world.shelf.end("", Entry(response("x")))


def test_processes_share_a_file_and_what_a_lost_one_computed_has_failed(tmp_path: Path) -> None:
    file = tmp_path / "responses.sqlite"
    first, second = World(file=file), World(file=file, owner="b")
    first.put("a")
    assert second.kept("a") == "a"
    second.put("b", previous="a")
    assert ids(first.shelf.history("", "b", RESPONSE, 10**6)) == ["a-in", "a-out", "b-in", "b-out"]
    for world, name in ((first, "mine"), (second, "theirs")):
        world.shelf.put("", RESPONSE, Entry(response(name, "queued")), 50.0)
    first.shelf.close()
    again = World(file=file)
    found = {name: again.shelf.get("", name, RESPONSE) for name in ("mine", "theirs")}
    assert {name: each.body["status"] for name, each in found.items() if each} == {"mine": "failed", "theirs": "queued"}
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600] * 3
    for world in (again, second):
        world.shelf.close()


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "text"
    wrong.write_text("no database" * 1000)
    later = tmp_path / "later"
    with sqlite3.connect(later) as database:
        database.execute("PRAGMA user_version = 9")
    database.close()
    for file in (wrong, later, tmp_path, tmp_path / "absent" / "file"):
        with pytest.raises(ConfigError, match="responses_file: "):
            World(file=file)


@given(st.lists(st.tuples(st.sampled_from("pgdtc"), st.integers(0, 7), st.integers(0, 3000)), max_size=30))
def test_counted_bytes_are_those_that_are_there(steps: list[tuple[str, int, int]]) -> None:
    world = World(Limits(4, 9000, 20.0))
    names: list[str] = []
    for place, (step, number, size) in enumerate(steps):
        name = names[number % len(names)] if names else "none"
        match step:
            case "p":
                names.append(f"r{place}")
                world.put(names[-1], size=size)
            case "g":
                world.shelf.change("", name, RESPONSE, lambda found: found.body | {"more": "x" * size})  # noqa: B023
            case "d":
                world.shelf.delete("", name, RESPONSE)
            case "t":
                world.now_s += number
            case _:
                world.shelf.put("", CONVERSATION, Entry(response(f"c{place}"), [item("1")]))
                world.shelf.append("", f"c{place}", [item("2", size)])
        num, num_bytes = world.shelf.counts()
        assert num <= 4
        database = world.shelf._db
        (bodies,) = database.execute("SELECT TOTAL(LENGTH(body)) FROM holders").fetchone()
        (items,) = database.execute("SELECT TOTAL(LENGTH(body) + 100) FROM items").fetchone()
        assert num_bytes == bodies + items
        (orphans,) = database.execute(
            "SELECT COUNT(*) FROM items WHERE NOT EXISTS (SELECT 1 FROM holders WHERE holders.id = items.holder)"
        ).fetchone()
        assert orphans == 0
    world.shelf.close()


async def test_a_file_has_one_process_of_a_name_at_a_time(tmp_path: Path) -> None:
    file, limits = tmp_path / "responses.sqlite", Limits(9, 1 << 24, 1e9)
    store = Store(file, limits, "frontend/0", KeptCounts())
    await Store(file, limits, "frontend/1", KeptCounts()).close()
    with pytest.raises(ConfigError, match="another process named frontend/0"):
        Store(file, limits, "frontend/0", KeptCounts())
    await store.close()
    await Store(file, limits, "frontend/0", KeptCounts()).close()
