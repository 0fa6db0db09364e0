"""What workers do for the cluster: what routers place on them. Pure."""

from enum import StrEnum


class Role(StrEnum):
    """A worker's role, named as in link.proto. A mixed worker is in both pools."""

    PREFILL = "prefill"  # computes prompts and hands them off
    DECODE = "decode"  # decodes prompts that arrive
    MIXED = "mixed"  # both

    @property
    def prefills(self) -> bool:
        """Whether its workers are in the pool that computes prompts to hand off."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether its workers are in the pool that hand-offs go to."""
        return self is not Role.PREFILL
