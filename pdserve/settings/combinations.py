"""Which settings of a worker's device, ranks and KV go together: what no test has compared is refused."""


def ranks_problem(num_ranks: int, num_stages: int, device: str, kv_cache_dtype: str) -> str | None:
    """Return why workers do not have so many ranks and pipeline stages, or keep K and V so, or None."""
    sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    if num_ranks > 1 and num_stages > 1:
        return f"pipeline_parallel_size: {num_stages} is not served with tensor_parallel_size {num_ranks} yet"
    for name, size in sizes.items():
        if size > 1 and device in ("cuda", "interpreter"):
            return f"{name}: {size} is refused: a worker on {device} has one device"
    if kv_cache_dtype != "auto" and device not in ("auto", "cpu"):
        return f"kv_cache_dtype: {kv_cache_dtype} is served on a CPU, not on {device}"
    if kv_cache_dtype != "auto" and num_ranks * num_stages > 1:
        return f"kv_cache_dtype: {kv_cache_dtype} is served by one rank; for {num_ranks * num_stages}, auto is"
    return None
