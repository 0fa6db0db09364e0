"""How much of a device's memory is left for KV pages once the model is on it. Pure.

A step's need is an upper estimate from shapes: no step is run to measure it.
"""

from pdserve.model.config import ModelConfig

WORKSPACE_BYTES = 256 << 20  # of libraries, and of attention's partial results
SAMPLING_BYTES = 8  # per logit: a count and a changed logit, where a row has penalties
GRAPH_SHARE = 2  # the captured sizes are powers of two: together less than twice the largest


def step_bytes(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int, element_bytes: int) -> int:
    """Return what the largest step and all captured ones take at most, beside weights and pages."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = (4 * config.hidden_size + heads + 3 * config.intermediate_size) * element_bytes
    logits = config.vocab_size * (element_bytes + SAMPLING_BYTES)
    captured = GRAPH_SHARE * max_num_seqs * (per_token + config.vocab_size * element_bytes)
    return max_num_batched_tokens * per_token + max_num_seqs * logits + captured + WORKSPACE_BYTES


def pages_that_fit(total_bytes: int, bytes_in_use: int, utilization: float, page_bytes: int) -> int:
    """Return how many pages fit into `utilization` of the memory beside what is in use; 0 if none does."""
    return max(0, int(total_bytes * utilization) - bytes_in_use) // page_bytes
