"""Move KV pages from a prefill worker to a decode worker, fenced and verified."""
