"""Which pages hold which prefix: content-addressed reuse of full pages.

A page's name is a keyed hash chained over everything before it: (key, salt, tokens of page 0), then (name of page
i-1, tokens of page i). Equal names mean equal tokens at equal positions under the same salt, so equal KV. The key is
secret to the cluster; a tenant that guesses tokens cannot make names collide.
"""

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from pdserve.ids import PageId
from pdserve.token_ids import TOKEN_ID_BYTES, pack

PageName = bytes  # 16 bytes

NAME_BYTES = 16
MAX_KEY_BYTES = 64  # BLAKE2b's limit


class PrefixNames:
    """Names pages of token sequences."""

    def __init__(self, key: bytes, context: str, page_size: int) -> None:
        """`context` separates what must never share pages: weights, adapter."""
        self._keyed = hashlib.blake2b(key=key[:MAX_KEY_BYTES], digest_size=NAME_BYTES)
        self._before_salt = len(context.encode()).to_bytes(4, "big") + context.encode()
        self._page_size = page_size

    def root(self, salt: str) -> PageName:
        """Return the name before the first page of any sequence under `salt`."""
        digest = self._keyed.copy()
        digest.update(self._before_salt + salt.encode())
        return digest.digest()

    def extend(self, parent: PageName, token_ids: Sequence[int], start: int) -> list[PageName]:
        """Return the names of the full pages of `token_ids` from position `start` (a page border) on."""
        keyed, names = self._keyed, []
        packed, page_bytes = memoryview(pack(token_ids[start:])).cast("B"), self._page_size * TOKEN_ID_BYTES
        for begin in range(0, len(packed) - page_bytes + 1, page_bytes):
            digest = keyed.copy()
            digest.update(parent)
            digest.update(packed[begin : begin + page_bytes])
            parent = digest.digest()
            names.append(parent)
        return names


class PrefixIndex:
    """Maps names to pages. One page has at most one name, one name one page."""

    def __init__(self) -> None:
        self._page: dict[PageName, PageId] = {}
        self._name: dict[PageId, PageName] = {}

    def __len__(self) -> int:
        return len(self._page)

    def pages(self) -> AbstractSet[PageId]:
        """Return every indexed page."""
        return self._name.keys()

    def match(self, names: Sequence[PageName]) -> tuple[PageId, ...]:
        """Return the pages of the longest indexed run of leading names."""
        pages = []
        for name in names:
            page = self._page.get(name)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def add(self, names: Sequence[PageName], pages: Sequence[PageId], run: range) -> list[range]:
        """Index the pages `run` of a sequence, by number; return the runs that are new.

        A page that has a name keeps it, and so does a name that has a page.
        """
        page_of, name_of, added, start = self._page, self._name, list[range](), run.start
        for i in run:
            name, page = names[i], pages[i]
            if name in page_of or page in name_of:
                added.append(range(start, i))
                start = i + 1
            else:
                page_of[name] = page
                name_of[page] = name
        return [*added, range(start, run.stop)]

    def forget(self, pages: Sequence[PageId]) -> list[PageName]:
        """Drop pages whose content is about to change; return the names of those that were indexed."""
        names = []
        for page in pages:
            name = self._name.pop(page, None)
            if name is not None:
                del self._page[name]
                names.append(name)
        return names
