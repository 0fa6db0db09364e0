"""Cut a step's attention into work items, on the host, with numpy and no loop over tokens.

An item is up to `tokens_per_item` queries of one sequence against one range of its keys. Keys are split into several
items only if too few items would leave the chip idle; the combine kernel joins split items.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer]
Int32s = npt.NDArray[np.int32]

ITEM_FIELDS = 8  # first_page, q_start, q_count, q_position, kv_begin, kv_end, partial, num_splits
COMBINE_FIELDS = 4  # q_start, q_count, first_partial, num_splits
SPLIT_CHOICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)
SPLIT_COST_TILES = 3.0  # what starting an item and writing, then combining, its partial result costs, in tiles


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Items, longest first, and which of them are combined afterwards."""

    items: Int32s  # [num_items, ITEM_FIELDS]
    combines: Int32s  # [num_combines, COMBINE_FIELDS]
    num_partials: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """How items may be cut."""

    tokens_per_item: int
    tile: int  # keys in one tile; splits fall on its multiples
    num_kv_heads: int  # every item runs once per K/V head
    slots: int  # items the chip runs at a time
    page_size: int
    window: int | None = None
    max_items: int | None = None
    max_partials: int | None = None  # results of split items that there is room for


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Queries that share an item, before their keys are split; one array entry each."""

    first_page: Ints  # where the sequence's pages begin among those of all
    q_start: Ints
    q_count: Ints
    q_position: Ints
    kv_begin: Ints
    kv_end: Ints
    tiles: Ints


def pages_in_use(page_table: Ints, kv_lens: Ints, page_size: int) -> Ints:
    """Return the pages of all sequences, one sequence after another. page_table: [num_seqs, columns]."""
    counts = -(-kv_lens // page_size)
    return page_table[np.arange(page_table.shape[1]) < counts[:, None]]


def split_work(query_lens: Ints, kv_lens: Ints, cutting: Cutting) -> WorkPlan:
    """Return the items of a step. query_lens, kv_lens: [num_seqs]; kv_len counts the queries' own positions.

    An item's `first_page` is where its sequence's pages begin in `pages_in_use`.
    """
    blocks = _query_blocks(query_lens, kv_lens, cutting)
    per_item = _tiles_per_item(blocks.tiles, cutting)
    splits = -(-blocks.tiles // per_item)
    even = -(-blocks.tiles // splits)
    splits = -(-blocks.tiles // even)

    block = np.repeat(np.arange(len(splits)), splits)
    part = np.arange(len(block)) - np.repeat(np.cumsum(splits) - splits, splits)
    span = even[block] * cutting.tile
    begin = blocks.kv_begin[block] + part * span
    end = np.minimum(blocks.kv_end[block], begin + span)
    partials = np.where(splits > 1, splits, 0)
    first_partial = np.cumsum(partials) - partials

    items = np.empty((len(block), ITEM_FIELDS), dtype=np.int32)
    shared = (blocks.first_page, blocks.q_start, blocks.q_count, blocks.q_position)
    columns = [column[block] for column in shared]
    columns += [begin, end, first_partial[block] + part, splits[block]]
    for index, column in enumerate(columns):
        items[:, index] = column
    items = items[np.argsort(begin - end, kind="stable")]
    split = splits > 1
    combines = np.stack((blocks.q_start, blocks.q_count, first_partial, splits), axis=1)[split].astype(np.int32)
    return WorkPlan(items, combines, int(partials.sum()))


def _query_blocks(query_lens: Ints, kv_lens: Ints, cutting: Cutting) -> _Blocks:
    size = cutting.tokens_per_item
    counts = -(-query_lens // size)
    seq = np.repeat(np.arange(len(query_lens)), counts)
    offset = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    q_count = np.minimum(size, query_lens[seq] - offset)
    q_position = (kv_lens - query_lens)[seq] + offset
    kv_end = q_position + q_count
    kv_begin = np.zeros_like(kv_end)
    if cutting.window is not None:
        kv_begin = np.maximum(0, q_position - cutting.window + 1) // cutting.tile * cutting.tile
    tiles = -(-(kv_end - kv_begin) // cutting.tile)
    q_start = (np.cumsum(query_lens) - query_lens)[seq] + offset
    pages = -(-kv_lens // cutting.page_size)
    first_page = (np.cumsum(pages) - pages)[seq]
    return _Blocks(first_page, q_start, q_count, q_position, kv_begin, kv_end, tiles)


def _tiles_per_item(tiles: Ints, cutting: Cutting) -> int:
    """Choose the longest item, in tiles, that makes the step end soonest by a simple model of the chip."""
    longest = int(tiles.max())
    best, best_cost = longest, float("inf")
    for pieces in SPLIT_CHOICES:
        if pieces > longest:
            break
        per_item = -(-longest // pieces)
        splits = -(-tiles // per_item)
        num_items = int(splits.sum())
        if cutting.max_items is not None and num_items > cutting.max_items:
            break
        if cutting.max_partials is not None and int(splits[splits > 1].sum()) > cutting.max_partials:
            break
        cost = _makespan(tiles, splits, per_item, num_items * cutting.num_kv_heads, cutting)
        if cost < best_cost:
            best, best_cost = per_item, cost
    return best


def _makespan(tiles: Ints, splits: Ints, per_item: int, num_running: int, cutting: Cutting) -> float:
    """Estimate the time of a step in tiles: all work spread over the chip, plus the wait for the last item."""
    overhead = SPLIT_COST_TILES * (1.0 + float((splits > 1).any()))
    if num_running <= cutting.slots:
        return per_item + overhead
    work = float(tiles.sum()) * cutting.num_kv_heads + overhead * num_running
    return work / cutting.slots + 0.5 * (per_item + overhead)
