"""What an operator may set of a decode worker's decisions. The defaults are the configuration's."""

from dataclasses import dataclass

from pdserve.kvtransfer.session import DigestPolicy


@dataclass(frozen=True, slots=True)
class Rules:
    max_tasks: int
    digests: DigestPolicy
    max_quarantined_share: float  # of all pages; above it, only another process has enough of them
    lease_s: float  # a prefill worker that says nothing for so long has lost its grants
