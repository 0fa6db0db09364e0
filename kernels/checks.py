"""Refuse arguments a kernel does not serve, before it is launched; every message names the argument."""

from collections.abc import Sequence

from torch import Tensor, dtype

from pdserve.kernels.attention_plan import Ints


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless `condition` holds. The message is always built: put no whole array into it."""
    if not condition:
        raise ValueError(message)


def require_tensor(name: str, tensor: Tensor, shape: Sequence[int | None], dtypes: Sequence[dtype]) -> None:
    """Check a tensor's shape (None: any), dtype, and that its last axis is dense."""
    fits = tensor.ndim == len(shape)
    for want, got in zip(shape, tensor.shape, strict=False):
        fits = fits and (want is None or want == got)
    if not fits:
        want_shape = "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name} must have shape {want_shape}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {list(dtypes)}, got {tensor.dtype}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name} must have stride 1 in its last axis, got {tensor.stride()}")


def require_words(name: str, rows: Tensor) -> None:
    """Check that rows of bytes begin at words of 4 bytes."""
    fits = rows.data_ptr() % 4 == 0 and all(stride % 4 == 0 for stride in rows.stride()[:-1])
    require(fits, f"{name} must have rows at multiples of 4 bytes, got strides {rows.stride()}")


def require_lens(query_lens: Ints, kv_lens: Ints) -> None:
    """Check that every sequence has queries, and keys for at least those."""
    is_vector = query_lens.ndim == 1 and len(query_lens) > 0
    require(is_vector, f"query_lens must be a non-empty vector, got {query_lens.shape}")
    require(kv_lens.shape == query_lens.shape, f"kv_lens must be as long as query_lens, got {kv_lens.shape}")
    require(bool((query_lens >= 1).all()), "query_lens must all be at least 1")
    require(bool((kv_lens >= query_lens).all()), "kv_lens must count the queries' own positions too")


def require_page_table(page_table: Ints, kv_lens: Ints, page_size: int) -> None:
    """Check that the table has a column for each page in use. Whether the pages exist is up to the caller."""
    columns = -(-int(kv_lens.max()) // page_size)
    fits = page_table.ndim == 2 and page_table.shape[0] == len(kv_lens) and page_table.shape[1] >= columns
    require(fits, f"page_table must be [{len(kv_lens)}, >= {columns}], got {list(page_table.shape)}")
