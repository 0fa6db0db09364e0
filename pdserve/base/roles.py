"""What workers do for the cluster: what routers place on them. Pure."""

from enum import StrEnum


class Role(StrEnum):
    """A worker's role, named as in link.proto. A mixed worker is in both pools."""

    PREFILL = "prefill"  # computes prompts and hands them off
    DECODE = "decode"  # decodes prompts that arrive
    MIXED = "mixed"  # both

    def is_in(self, pool: "Role") -> bool:
        """Whether its workers compute prompts to hand off (the pool PREFILL), or take hand-offs (DECODE)."""
        return self is pool or self is Role.MIXED


POOLS = (Role.PREFILL, Role.DECODE)


def lacks_pages(role: Role, num_pages: int, num_longest: int) -> str:
    """Return why a worker cannot take a role with a pool of `num_pages`, or nothing.

    `num_longest`: pages of the longest sequence. See `engine.kvcache.Room` for why a mixed worker needs two.
    """
    if role is not Role.MIXED or num_pages >= 2 * num_longest:
        return ""
    return f"{num_pages} pages are less than two of the longest sequences need, {2 * num_longest}, as {role} workers do"
