"""Which pages hold which tokens, where a model keeps KV in several groups of layers. Pure.

All pages of a pool have the same number of bytes, so that a page can serve any group: it holds the fewer tokens, the
more layers its group has. In a group with a window, later queries do not see old tokens: a page is not needed any more
once all of its tokens are out of the window of the next query.

How many pages a sequence needs at most is said here alone (`Paging.most_pages`): admission, limits of lengths, routers
and `pdserve models check` all ask it. A prompt has pages for the window, and for the chunks that may be under way at
once.

A span is as many tokens as the largest page holds. It fills whole pages in every group, so prefixes are found, shared
and sent span by span.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.base.errors import ConfigError
from pdserve.base.values import value

FEW_TOKENS = 64  # of prompts: a step with no more is short. Pages of a model with states hold thousands
# Pages that a sequence takes beyond its tokens: half of its last page, and one to grow into.
PAGES_BESIDE = 1.5
CHUNKS_AT_ONCE = 2  # of one prompt: one is computed while the next is planned


@value
class PageShape:
    """The pages of one group."""

    page_size: int  # tokens
    window: int | None = None  # how many tokens a query sees, its own included; None: all
    is_state: bool = False  # a page holds what is kept of all tokens up to its last, and is sent and held whole


class Paging:
    """The groups of a model, in the order in which sequences list their pages."""

    def __init__(self, shapes: Iterable[PageShape]) -> None:
        """ConfigError unless every page size divides the largest, and queries of the first group see all tokens."""
        self.shapes = tuple(shapes)
        self.sizes = tuple(shape.page_size for shape in self.shapes)
        self.span = max(self.sizes)
        self.few_tokens = min(self.span, FEW_TOKENS)
        self.has_windows = any(shape.window is not None for shape in self.shapes)
        self.has_states = any(shape.is_state for shape in self.shapes)
        self.is_single = len(self.shapes) == 1
        if any(size < 1 or self.span % size for size in self.sizes):
            raise ConfigError(f"page_size: {self.sizes} are not all divisors of the largest")
        if self.shapes[0].window is not None:
            raise ConfigError("window: the first group has one; put a group of full attention first")

    @classmethod
    def of(cls, page_size: int) -> "Paging":
        """Return the paging of a model whose layers are all alike."""
        return cls((PageShape(page_size),))

    @property
    def pages_a_token(self) -> float:
        """Return which part of pages a token fills, as if there were no windows. States grow by none."""
        return sum([1 / shape.page_size for shape in self.shapes if not shape.is_state])

    @property
    def pages_beside(self) -> float:
        """Return how many pages to keep for a decoding sequence beyond those that `mean_pages` counts.

        With states so many tokens as common pages have: `mean_pages` counts begun pages, and it takes long to fill one.
        """
        return PAGES_BESIDE * self.few_tokens / self.span if self.has_states else PAGES_BESIDE

    def whole_tokens(self, num_pages: int) -> int:
        """Return how many tokens so many pages hold, as if there were no windows."""
        return num_pages * self.span if self.is_single else int(num_pages / self.pages_a_token)

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many pages so many tokens fill, as if there were no windows."""
        return num_tokens // self.span if self.is_single else int(num_tokens * self.pages_a_token)

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages hold the first `num_tokens` tokens in all groups."""
        if self.is_single:
            return -(-num_tokens // self.span)
        return sum([-(-num_tokens // size) for size in self.sizes])

    def first_needed(self, group: int, num_tokens: int) -> int:
        """Return the number of the first page of a group that queries at position `num_tokens` and later see."""
        size, window = self.shapes[group].page_size, self.shapes[group].window
        return 0 if window is None else max(0, num_tokens - window + 1) // size

    def most_pages(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Return how many pages a sequence needs at most, from its first chunk until it has so many tokens.

        step_tokens: that a step computes of it at most; by default it decodes.
        """
        if not self.has_windows:
            return self.num_pages(num_tokens)
        return sum(self.ends(0, num_tokens, step_tokens))

    def ends(self, num_computed: int, num_tokens: int, step_tokens: int) -> list[int]:
        """Return in each group the number of pages, from the first on, up to which a sequence needs pages.

        It has so many tokens, of which the first `num_computed` have KV.
        """
        whole, found = num_computed // self.span * self.span, []
        for group, size in enumerate(self.sizes):
            end, most = -(-num_tokens // size), self._most_live(group, step_tokens)
            found.append(end if most is None else min(end, self.first_needed(group, whole) + most))
        return found

    def mean_pages(self, num_tokens: float, num_sequences: float) -> float:
        """Return how many pages decoding sequences have that have so many tokens together, but for begun pages.

        They are taken to be of one length. Of several lengths they have no more. Where there are states, pages are
        large, and begun ones are counted.
        """
        if self.is_single:
            return num_tokens / self.span
        each, pages = num_tokens / num_sequences, 0.0
        if self.has_states:
            return (-(-each // self.span) + 1) * num_sequences
        for group, size in enumerate(self.sizes):
            most = self._most_live(group, 1)
            pages += each / size if most is None else min(each / size, most)
        return pages * num_sequences

    def most_tokens(self, num_pages: int, step_tokens: int, limit: int) -> int:
        """Return the greatest length up to `limit` of a sequence that needs no more pages than these."""
        if self.most_pages(limit, step_tokens) <= num_pages:
            return limit
        return bisect_right(range(1, limit + 1), num_pages, key=lambda length: self.most_pages(length, step_tokens))

    def sent_pages(self, num_tokens: float) -> float:
        """Return how many pages the last tokens of a prompt fill that a hand-off sends, but for begun pages."""
        if self.has_states:
            return -(-num_tokens // self.span) + 1
        return sum([min(num_tokens, shape.window or num_tokens) / shape.page_size for shape in self.shapes])

    def _most_live(self, group: int, step_tokens: int) -> int | None:
        """Return how many pages of a group with a window a sequence needs at once; None: those of all its tokens.

        Pages stay until their whole span has left the window of the next query, since then they can be found by its
        hash. Others are there for the chunks that may be under way.
        """
        size, window = self.shapes[group].page_size, self.shapes[group].window
        if window is None:
            return None
        return (window - 1 + self.span - 1 + CHUNKS_AT_ONCE * step_tokens + size - 2) // size + 1


@dataclass(frozen=True, slots=True)
class PageOrder:
    """The order in which both ends of a hand-off name its pages, by group and number.

    Pages come by their first token, and those with the same first token by group. So the pages of a shorter prefix
    come before those that a longer one adds. Pages that no query at position `num_known` or later sees are left out.
    Both ends know `num_known` before the first page is sent.
    """

    paging: Paging
    num_known: int  # tokens that the receiver's job names

    def count(self, num_tokens: int) -> int:
        """Return how many pages a hand-off of so many tokens has."""
        paging = self.paging
        if paging.is_single:
            return -(-num_tokens // paging.span)
        return sum(
            max(0, -(-num_tokens // size) - paging.first_needed(group, self.num_known))
            for group, size in enumerate(paging.sizes)
        )

    def num_tokens(self, count: int) -> int:
        """Return how many tokens the first `count` pages have room for."""
        if self.paging.is_single:
            return count * self.paging.span
        most = count * self.paging.sizes[0]  # every token is in a page of the first group
        return bisect_right(range(most + 1), count, key=self.count) - 1

    def pages(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return group and number of the pages that begin with one of tokens[start:stop]; `start` begins a span."""
        found: list[tuple[int, int, int]] = []
        for group, size in enumerate(self.paging.sizes):
            first = max(start // size, self.paging.first_needed(group, self.num_known))
            found += [(number * size, group, number) for number in range(first, -(-stop // size))]
        return [(group, number) for _, group, number in sorted(found)]
