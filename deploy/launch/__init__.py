"""Start a cluster's processes on this machine and keep them running."""
