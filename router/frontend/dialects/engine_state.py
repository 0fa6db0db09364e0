"""The cluster behind a router as one engine: what the gateways of single engines ask of it."""

from pdserve.roles import Role
from pdserve.router.shell import Shell
from pdserve.values import value


@value
class EngineState:
    """Looked at whenever somebody asks."""

    is_ready: bool  # some pair of workers could serve a request now
    num_running: int
    num_waiting: int
    num_tokens: int  # in pages that are in use on decode workers
    max_num_tokens: int  # that these have pages for
    max_num_seqs: int  # that these run at once


def engine_state(shell: Shell) -> EngineState:
    """Return the state of the workers that a router knows."""
    core, num_tokens, max_num_tokens, max_num_seqs = shell.core, 0, 0, 0
    for worker in core.workers:
        if not worker.role.is_in(Role.DECODE):
            continue
        known, stream = worker.registration, shell.streams.get(worker.link)
        num_free = known.num_pages if stream is None else stream.load.pages_free
        num_tokens += (known.num_pages - num_free) * known.layout.page_size
        max_num_tokens += known.num_pages * known.layout.page_size
        max_num_seqs += known.max_num_seqs
    return EngineState(core.is_ready, core.num_active, core.num_held, num_tokens, max_num_tokens, max_num_seqs)
