"""What is kept of responses and conversations, in SQLite: in memory, or in a file that several processes may share.

Invariant: a tenant has at most `max_num` responses and conversations and about `max_bytes` of them, unless more than
that are being computed. What was not used for the longest is forgotten first, and everything that was not used for
`ttl_s`. To continue a response is to use it and all before it. No tenant sees another's.

Calls block: `store.py` makes them in a thread. Each one is a transaction.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from pdserve.base.errors import ConfigError
from pdserve.base.values import value

Json = dict[str, Any]
IN_MEMORY = ":memory:"
VERSION = 1  # of the tables
BUSY_S = 5.0  # for which another process may hold the file
ITEM_BYTES = 100  # of an item besides its JSON, roughly
PRIVATE = 0o600
HAS_ENDED = "(until_s IS NULL OR until_s < ?)"  # or its process has, before it could
_TABLES = """
CREATE TABLE IF NOT EXISTS holders (
    tenant TEXT NOT NULL, id TEXT NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, previous TEXT NOT NULL,
    owner TEXT NOT NULL, until_s REAL, used_s REAL NOT NULL, num_bytes INTEGER NOT NULL, PRIMARY KEY (tenant, id));
CREATE INDEX IF NOT EXISTS by_use ON holders (tenant, used_s, num_bytes);
CREATE INDEX IF NOT EXISTS by_age ON holders (used_s);
CREATE INDEX IF NOT EXISTS by_owner ON holders (owner) WHERE until_s IS NOT NULL;
CREATE TABLE IF NOT EXISTS items (
    tenant TEXT NOT NULL, holder TEXT NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL, is_output INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (tenant, holder, place));
CREATE INDEX IF NOT EXISTS items_by_id ON items (tenant, id);
"""


class Kind(StrEnum):
    """What holds items."""

    RESPONSE = "response"
    CONVERSATION = "conversation"


@value
class Limits:
    """What is kept, and for how long."""

    max_num: int  # of a tenant
    max_bytes: int  # of a tenant
    ttl_s: float  # without use


@value
class Holder:
    """A response or a conversation, as it is kept."""

    body: Json
    previous: str  # the response that it continues
    is_running: bool
    num_bytes: int  # with its items


@value
class Entry:
    """What is put on the shelf."""

    body: Json
    given: Sequence[Json] = ()  # input items
    output: Sequence[Json] = ()  # items
    previous: str = ""  # the response that it continues
    conversation: str = ""  # that gets its items, too, if it is still there


class Missing(Exception):  # noqa: N818 - no error of this process
    """A holder is not there, or no more."""


class TooMuch(Exception):  # noqa: N818 - as above
    """What is continued has more bytes than may be continued."""


class Shelf:
    """The tables. `now_s` is the wall clock's: a file outlives processes."""

    def __init__(self, file: Path | None, limits: Limits, owner: str, now_s: Callable[[], float]) -> None:
        """`owner`: this process's name, which no other process that runs has. ConfigError for an unusable file.

        What an earlier process of this name was computing has failed.
        """
        self._limits, self._owner, self._now_s = limits, owner, now_s
        self.num_forgotten = 0  # over the limits
        try:
            if file is not None:
                os.close(os.open(file, os.O_CREAT | os.O_RDWR, PRIVATE))
            self._db = sqlite3.connect(
                IN_MEMORY if file is None else file, BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last ones, and harms no others
            self._db.execute("PRAGMA secure_delete = ON")
            with self._transaction():
                self._create(file)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"responses_file: {file}: {error}") from error

    def close(self) -> None:
        self._db.close()

    def _create(self, file: Path | None) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise ConfigError(f"responses_file: {file} is of version {version} of pdserve's tables, {VERSION} is known")
        for statement in _TABLES.split(";"):
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version = {VERSION}")
        for tenant, name in self._rows(
            "SELECT tenant, id FROM holders WHERE owner = ? AND until_s IS NOT NULL", self._owner
        ):
            self._lose(tenant, name)

    # ---- holders

    def put(self, tenant: str, kind: Kind, entry: Entry, running_s: float | None = None) -> None:
        """Keep a holder with its items; forget what is over the limits.

        `running_s`: how long the response may still be computed; None: it has ended.
        """
        now_s, name, packed = self._now_s(), entry.body["id"], msgspec.json.encode(entry.body)
        until_s = None if running_s is None else now_s + running_s
        row = (tenant, name, kind, packed, entry.previous, self._owner, until_s, now_s, len(packed))
        with self._transaction():
            self._db.execute("INSERT INTO holders VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._add(tenant, name, entry.given, is_output=False)
            if running_s is None:
                self._add_output(tenant, entry)
            self._make_room(tenant, name)

    def get(self, tenant: str, name: str, kind: Kind) -> Holder | None:
        """Return a holder. A response that was not ended in its time has failed."""
        with self._transaction():
            return self._get(tenant, name, kind)

    def change(self, tenant: str, name: str, kind: Kind, change: Callable[[Holder], Json]) -> Json | None:
        """Replace the body of a holder by what `change` returns of it, and return that; None if it is not there."""
        with self._transaction():
            found = self._get(tenant, name, kind)
            return None if found is None else self._write(tenant, name, change(found), is_running=found.is_running)

    def cancel(self, tenant: str, name: str) -> Holder | None:
        """Cancel a response if it is being computed; return it as it is then, None if it is not there."""
        with self._transaction():
            found = self._get(tenant, name, Kind.RESPONSE)
            if found is not None and found.is_running:
                self._write(tenant, name, found.body | {"status": "cancelled"}, is_running=False)
                return self._get(tenant, name, Kind.RESPONSE)
            return found

    def end(self, tenant: str, entry: Entry) -> bool:
        """Let a response that is being computed end, with its output; False (and change nothing) if it has ended."""
        name = entry.body["id"]
        with self._transaction():
            found = self._get(tenant, name, Kind.RESPONSE)
            if found is None or not found.is_running:
                return False
            self._write(tenant, name, entry.body, is_running=False)
            self._add_output(tenant, entry)
            self._make_room(tenant, name)
            return True

    def delete(self, tenant: str, name: str, kind: Kind) -> bool:
        """Forget a holder with its items; False if it is not there."""
        with self._transaction():
            if self._get(tenant, name, kind) is None:
                return False
            self._forget(tenant, name)
            return True

    # ---- items

    def append(self, tenant: str, name: str, items: Sequence[Json]) -> bool:
        """Add items to a conversation; False if it is not there."""
        with self._transaction():
            if self._get(tenant, name, Kind.CONVERSATION) is None:
                return False
            self._add(tenant, name, items, is_output=False)
            self._use(tenant, name)
            self._make_room(tenant, name)
            return True

    def items(self, tenant: str, name: str) -> list[Json]:
        """Return a conversation's items, or a response's input, in their order."""
        with self._transaction(writes=False):
            return self._items(tenant, name, "AND is_output = 0")

    def history(self, tenant: str, name: str, kind: Kind, max_bytes: int) -> list[Json]:
        """Return all items up to the end of a response, or of a conversation, and note that they were used.

        Missing if it is not there, or a response before it. TooMuch if they have more bytes than that.
        """
        with self._transaction():
            found, parts, num_bytes = self._get(tenant, name, kind), list[list[Json]](), 0
            while True:
                if found is None:
                    raise Missing(name)
                num_bytes += found.num_bytes
                if num_bytes > max_bytes:
                    raise TooMuch(name)
                parts.append(self._items(tenant, name))
                self._use(tenant, name)
                if not found.previous:
                    return [item for part in reversed(parts) for item in part]
                name = found.previous
                found = self._get(tenant, name, kind)

    def first(self, tenant: str, name: str) -> str:
        """Return the response with which the one of this name began, as far as it is kept."""
        of = "SELECT previous FROM holders WHERE tenant = ? AND id = ?"
        while before := next(self._rows(of, tenant, name), ("",))[0]:
            name = before
        return name

    def item(self, tenant: str, item_id: str, holder: str = "") -> bytes | None:
        """Return an item by its id, as JSON: a holder's, or the one that was kept last."""
        query = "SELECT i.body FROM items i JOIN holders h ON h.tenant = i.tenant AND h.id = i.holder"
        where = " WHERE i.tenant = ? AND i.id = ? AND h.used_s >= ? AND (? = '' OR i.holder = ?)"
        with self._transaction(writes=False):
            oldest_s = self._now_s() - self._limits.ttl_s
            order = " ORDER BY h.used_s DESC, i.place DESC LIMIT 1"
            for (body,) in self._rows(query + where + order, tenant, item_id, oldest_s, holder, holder):
                found: bytes = body
                return found
            return None

    def delete_item(self, tenant: str, name: str, item_id: str) -> Json | None:
        """Remove an item from a conversation; return the conversation, None if either is not there."""
        with self._transaction():
            found = self._get(tenant, name, Kind.CONVERSATION)
            of_item = "WHERE tenant = ? AND holder = ? AND id = ?"
            (num_bytes,) = self._db.execute(
                f"SELECT SUM(LENGTH(body) + {ITEM_BYTES}) FROM items {of_item}", (tenant, name, item_id)
            ).fetchone()
            if found is None or num_bytes is None:
                return None
            self._db.execute(f"DELETE FROM items {of_item}", (tenant, name, item_id))
            self._grow(tenant, name, -num_bytes)
            return found.body

    def counts(self) -> tuple[int, int]:
        """Return how many holders are kept of all tenants, and their bytes."""
        num, num_bytes = self._db.execute("SELECT COUNT(*), TOTAL(num_bytes) FROM holders").fetchone()
        return num, int(num_bytes)

    # ---- within a transaction

    def _get(self, tenant: str, name: str, kind: Kind) -> Holder | None:
        query = (
            "SELECT body, previous, until_s, used_s, num_bytes FROM holders WHERE tenant = ? AND id = ? AND kind = ?"
        )
        now_s = self._now_s()
        for body, previous, until_s, used_s, num_bytes in self._rows(query, tenant, name, kind):
            if until_s is not None and until_s < now_s:
                self._lose(tenant, name)
                return self._get(tenant, name, kind)
            if used_s >= now_s - self._limits.ttl_s or until_s is not None:
                return Holder(msgspec.json.decode(body), previous, until_s is not None, num_bytes)
        return None

    def _lose(self, tenant: str, name: str) -> None:
        """Note that a response was being computed by a process that has ended."""
        (body,) = next(self._rows("SELECT body FROM holders WHERE tenant = ? AND id = ?", tenant, name))
        error = {"code": "server_error", "message": "the process that computed this response has ended"}
        self._write(tenant, name, msgspec.json.decode(body) | {"status": "failed", "error": error}, is_running=False)

    def _write(self, tenant: str, name: str, body: Json, *, is_running: bool) -> Json:
        packed = msgspec.json.encode(body)
        changes = "body = ?, num_bytes = num_bytes - LENGTH(body) + ?, until_s = CASE WHEN ? THEN until_s END"
        query = f"UPDATE holders SET {changes} WHERE tenant = ? AND id = ?"
        self._db.execute(query, (packed, len(packed), is_running, tenant, name))
        return body

    def _items(self, tenant: str, name: str, wanted: str = "") -> list[Json]:
        query = f"SELECT body FROM items WHERE tenant = ? AND holder = ? {wanted} ORDER BY place"
        return [msgspec.json.decode(body) for (body,) in self._rows(query, tenant, name)]

    def _add_output(self, tenant: str, entry: Entry) -> None:
        """Add a response's output to its items, and all of them to its conversation."""
        self._add(tenant, entry.body["id"], entry.output, is_output=True)
        if entry.conversation and self._get(tenant, entry.conversation, Kind.CONVERSATION) is not None:
            self._add(tenant, entry.conversation, [*entry.given, *entry.output], is_output=False)
            self._use(tenant, entry.conversation)

    def _add(self, tenant: str, name: str, items: Sequence[Json], *, is_output: bool) -> None:
        query = "SELECT COALESCE(MAX(place) + 1, 0) FROM items WHERE tenant = ? AND holder = ?"
        (first,) = next(self._rows(query, tenant, name))
        packed = [(item["id"], is_output, msgspec.json.encode(item)) for item in items]
        rows = [(tenant, name, first + place, *row) for place, row in enumerate(packed)]
        self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._grow(tenant, name, sum(len(body) + ITEM_BYTES for *_, body in packed))

    def _grow(self, tenant: str, name: str, num_bytes: int) -> None:
        query = "UPDATE holders SET num_bytes = num_bytes + ? WHERE tenant = ? AND id = ?"
        self._db.execute(query, (num_bytes, tenant, name))

    def _use(self, tenant: str, name: str) -> None:
        query = "UPDATE holders SET used_s = ? WHERE tenant = ? AND id = ?"
        self._db.execute(query, (self._now_s(), tenant, name))

    def _make_room(self, tenant: str, kept: str) -> None:
        """Forget what is too old, and of this tenant what is over its limits; `kept` stays."""
        query, now_s = f"SELECT tenant, id FROM holders WHERE used_s < ? AND {HAS_ENDED}", self._now_s()
        for each, name in list(self._rows(query, now_s - self._limits.ttl_s, now_s)):
            self._forget(each, name)
        count, size = next(self._rows("SELECT COUNT(*), TOTAL(num_bytes) FROM holders WHERE tenant = ?", tenant))
        oldest = f"SELECT id, num_bytes FROM holders WHERE tenant = ? AND id <> ? AND {HAS_ENDED} ORDER BY used_s"
        rows = self._rows(oldest, tenant, kept, now_s)
        forgotten: list[str] = []
        while count > self._limits.max_num or size > self._limits.max_bytes:
            name, num_bytes = next(rows, ("", 0))
            if not name:
                break
            forgotten.append(name)
            count, size = count - 1, size - num_bytes
        for name in forgotten:
            self._forget(tenant, name)
        self.num_forgotten += len(forgotten)

    def _forget(self, tenant: str, name: str) -> None:
        self._db.execute("DELETE FROM items WHERE tenant = ? AND holder = ?", (tenant, name))
        self._db.execute("DELETE FROM holders WHERE tenant = ? AND id = ?", (tenant, name))

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        return iter(self._db.execute(query, values))

    @contextmanager
    def _transaction(self, *, writes: bool = True) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
