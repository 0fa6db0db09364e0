"""Which jobs a worker cannot take, whatever its load. Pure."""

from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Job
from pdserve.sampling import MAX_SEQUENCES
from pdserve.token_ids import ALL_IDS, largest

_INDICES = frozenset(range(MAX_SEQUENCES))


def refusal(scheduler: Scheduler, job: Job, vocab_size: int) -> str | None:
    """Return why this worker can never compute a job, or None. Guards against routers, not clients."""
    limits, num_tokens = scheduler.limits, len(job.token_ids)
    last = job.num_prompt_tokens + job.params.max_tokens
    needed = scheduler.cache.num_pages(min(last, limits.max_model_len))
    if not 0 < job.num_prompt_tokens <= num_tokens:
        return f"num_prompt_tokens: {job.num_prompt_tokens} of {num_tokens} tokens"
    if num_tokens >= limits.max_model_len:
        return f"token_ids: {num_tokens} leave no room under max_model_len {limits.max_model_len}"
    if needed > scheduler.cache.pool.num_pages:
        return f"token_ids: {last} tokens need {needed} pages of {scheduler.cache.pool.num_pages}"
    if vocab_size < ALL_IDS and (token_id := largest(job.token_ids)) >= vocab_size:
        return f"token_ids: {token_id} is not below the vocabulary size {vocab_size}"
    if not job.indices or not _INDICES.issuperset(job.indices):
        return f"indices: {job.indices} are not of {MAX_SEQUENCES} continuations"
    if len(set(job.indices)) > limits.max_num_seqs:
        return f"indices: {len(job.indices)} continuations, {limits.max_num_seqs} sequences run at once"
    return None
