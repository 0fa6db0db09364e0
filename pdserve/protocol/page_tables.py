"""The pages of one sequence, or of one prefix, by group. Pure."""

from pdserve.base.errors import InvariantError
from pdserve.base.ids import PageId
from pdserve.protocol.paging import PageOrder, Paging

Pages = tuple[PageId, ...]


class PageTables:
    """For each group a run of pages. Pages before the run have left the group's window, or were never needed."""

    __slots__ = ("firsts", "runs")

    def __init__(self, runs: tuple[list[PageId], ...] = (), firsts: list[int] | None = None) -> None:
        """Without runs there are no pages. firsts: the number of each run's first page; 0 unless given."""
        self.runs = runs
        self.firsts = [0] * len(runs) if firsts is None else firsts

    def __bool__(self) -> bool:
        return any(self.runs)

    @property
    def held(self) -> Pages:
        """Return all pages, each once."""
        if len(self.runs) == 1:
            return tuple(self.runs[0])
        return tuple([page for run in self.runs for page in run])

    def copy(self) -> "PageTables":
        return PageTables(tuple([run.copy() for run in self.runs]), self.firsts.copy())

    def find(self, group: int, number: int) -> PageId | None:
        """Return a group's page of this number, or None: it is not there, or not there any more."""
        place = number - self.firsts[group]
        return self.runs[group][place] if 0 <= place < len(self.runs[group]) else None

    def rows(self, paging: Paging, num_tokens: int) -> tuple[list[PageId], ...]:
        """Return the pages of the first tokens by group, as attention reads them.

        For pages that have left a window, or were never needed, stands any page.
        """
        parts = zip(self.runs, self.firsts, paging.sizes, strict=True)
        return tuple([[*run[:1] * first, *run[: -(-num_tokens // size) - first]] for run, first, size in parts])

    def add(self, order: PageOrder, pages: Pages, start: int, stop: int) -> None:
        """Add the pages of tokens[start:stop], in a hand-off's order. There are pages up to `start` already.

        InvariantError if a page between two that are needed is missing.
        """
        if len(self.runs) == 1:
            self.runs[0].extend(pages)
            return
        for (group, number), page in zip(order.pages(start, stop), pages, strict=True):
            if not self.runs[group]:
                self.firsts[group] = number
            elif number != self.firsts[group] + len(self.runs[group]):
                raise InvariantError(f"page {number} of group {group} does not follow those before")
            self.runs[group].append(page)

    def ordered(self, order: PageOrder, num_tokens: int) -> Pages:
        """Return the pages of the first `num_tokens` tokens in a hand-off's order.

        The order may name pages that have left their windows since the hand-off began. The first page stands for them:
        its content is final, and the receiver does not keep what it gets for them.
        """
        if len(self.runs) == 1:
            return tuple(self.runs[0][: order.count(num_tokens)])
        found = [self.find(group, number) for group, number in order.pages(0, num_tokens)]
        return tuple([self.runs[0][0] if page is None else page for page in found])

    def take_unneeded(self, paging: Paging, num_tokens: int) -> Pages:
        """Take out and return the pages that no query at position `num_tokens` or later sees."""
        taken: list[PageId] = []
        for group, run in enumerate(self.runs):
            count = min(len(run), paging.first_needed(group, num_tokens) - self.firsts[group])
            if count > 0:
                taken += run[:count]
                del run[:count]
                self.firsts[group] += count
        return tuple(taken)
