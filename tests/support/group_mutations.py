"""Bugs on purpose in models whose layers keep KV in several groups."""

from breaking import Original, breaks

from pdserve.protocol.page_tables import Pages, PageTables
from pdserve.protocol.paging import PageOrder, Paging


@breaks(Paging, "first_needed")
def give_up_a_window_one_token_early(original: Original, self: Paging, group: int, num_tokens: int) -> int:
    first: int = original(self, group, num_tokens + 1)
    return first


@breaks(PageTables, "ordered")
def send_pages_group_by_group(original: Original, self: PageTables, order: PageOrder, num_tokens: int) -> Pages:
    """Name the pages of a hand-off in another order than the receiver does."""
    pages: Pages = original(self, order, num_tokens)
    places = sorted(range(len(pages)), key=order.pages(0, num_tokens).__getitem__)
    return tuple(pages[place] for place in places)
