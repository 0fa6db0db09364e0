"""Where the conversations of clients live: which workers served the last turn of each. Pure.

Invariant: the table holds at most `max_sessions` conversations, and none that had no turn for LIFE_S; of too many, that
whose last turn is longest ago is forgotten. A conversation's key covers its tenant, so no tenant finds another's.

A home is a wish. The policy prices it (`goodput.py`), and a worker that left is nobody's home: links are never used
again.
"""

from collections import Counter, OrderedDict
from hashlib import blake2b

from pdserve.base.values import value
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.router.requests.events import LinkId

MAX_SESSIONS = 65_536  # some 25 MB
LIFE_S = 3600.0  # without a turn: pages are overwritten long before
KEY_BYTES = 16
NEW, KEPT, PARTLY, LEFT, GONE = TURNS = ("new", "kept", "partly", "left", "gone")

SessionKey = bytes  # KEY_BYTES of them; empty: the request names no conversation


@value
class Home:
    computes: LinkId  # the prompt
    decode: LinkId | None  # None: the first token ended it


@value
class _Entry:
    home: Home
    at_s: float


def session_key(scope: CacheScope, session: str) -> SessionKey:
    """Return what a conversation is found by: of other tenants and adapters it is another one."""
    if not session:
        return b""
    parts = scope.salt.encode(), scope.adapter, session.encode()
    packed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return blake2b(packed, digest_size=KEY_BYTES).digest()


class Sessions:
    """The homes of conversations, as this router placed their turns. Other routers have tables of their own."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._entries: OrderedDict[SessionKey, _Entry] = OrderedDict()  # the one with the oldest turn first
        self.num_forgotten = 0  # for want of room; old ones do not count
        self.turns = Counter[str]()  # placed, by what became of their homes

    def __len__(self) -> int:
        return len(self._entries)

    def home(self, key: SessionKey, now_s: float) -> Home | None:
        """Return where a conversation had its last turn; None if it names none, is new, or was forgotten."""
        self._forget_old(now_s)
        entry = self._entries.get(key) if key else None
        return None if entry is None else entry.home

    def bind(self, key: SessionKey, home: Home, now_s: float) -> None:
        """Note where a conversation's turn is placed."""
        if not key:
            return
        self._forget_old(now_s)
        self._entries[key] = _Entry(home, now_s)
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_sessions:
            self._entries.popitem(last=False)
            self.num_forgotten += 1

    def move(self, key: SessionKey, decode: LinkId) -> None:
        """Note that the running turn of a conversation goes on elsewhere."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries[key] = _Entry(Home(entry.home.computes, decode), entry.at_s)

    def count(self, before: Home | None, after: Home, *, is_there: bool) -> None:
        """Count a placed turn. `is_there`: whether a worker of the home before takes requests."""
        if before is None:
            self.turns[NEW] += 1
        elif not is_there:
            self.turns[GONE] += 1
        else:
            computes_kept = before.computes == after.computes
            num_kept = computes_kept + (computes_kept if before.decode is None else before.decode == after.decode)
            self.turns[(LEFT, PARTLY, KEPT)[num_kept]] += 1

    def _forget_old(self, now_s: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.at_s + LIFE_S > now_s:
                return
            del self._entries[key]
