"""What moving pages costs beside the bytes, as a table."""

from collections.abc import Sequence

from pdserve.kvtransfer.copy_benchmark import Cost, measure
from pdserve.measure.tables import Column, Sheet

_PAGE_BYTES = (64, 368_640)  # next to nothing, which leaves the price of a page, and a page of SmolLM2-135M
_NUM_PAGES = (1, 16, 64, 256)
_REPEATS = 20
_COLUMNS = (
    Column("page bytes"),
    Column("pages", "written in one copy"),
    Column("ask", "until a copy is asked for", rank=3),
    Column("post", "until it is posted", rank=1),
    Column("post CPU", "thread time of that", rank=2),
    Column("digest", "at one end", rank=1),
    Column("landed", "until the last byte is there"),
    Column("MB/s"),
)


def measure_handoff(*, tcp: bool) -> list[Cost]:
    """Measure pages of next to nothing, and pages of a model."""
    return [cost for page_bytes in _PAGE_BYTES for cost in measure(page_bytes, _NUM_PAGES, _REPEATS, tcp=tcp)]


def handoff_table(found: Sequence[Cost], *, tcp: bool) -> Sheet:
    """Return one row a size of page and number of pages."""
    rows = []
    for cost in found:
        times = (cost.ask_us, cost.post_us, cost.post_cpu_us, cost.digest_us, cost.landed_us)
        cells = (f"{cost.page_bytes:,}", str(cost.num_pages), *(f"{us:.2f}" for us in times))
        rows.append((*cells, f"{cost.bytes_per_s / 1e6:,.0f}"))
    title = f"NIXL between two processes, {'TCP' if tcp else 'carrier chosen by UCX'}; times are per page, in us"
    return Sheet(title, _COLUMNS, rows)
