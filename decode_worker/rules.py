"""What an operator may set of a decode worker's decisions."""

from dataclasses import dataclass

from pdserve.kvtransfer.session import DigestPolicy


@dataclass(frozen=True, slots=True)
class Rules:
    max_tasks: int = 1024
    digests: DigestPolicy = DigestPolicy.ALWAYS
    max_quarantined_share: float = 0.5  # of all pages; above it, only another process has enough of them
    lease_s: float = 4.0  # a prefill worker that says nothing for so long has lost its grants
