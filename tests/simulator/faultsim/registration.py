"""Who a simulated worker says it is, and how big it is."""

from dataclasses import dataclass

from faultsim.ranks import ONE_RANK
from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.base.roles import Role
from pdserve.kvtransfer.routes import Share
from pdserve.kvtransfer.session import Introduction
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.adapters import Adapter
from pdserve.protocol.kvlayout import KvGroup, KvLayout
from pdserve.protocol.link import ROLE_NUMBERS, layout_to_proto
from pdserve.protocol.paging import PageShape

MODEL = "chain-of-hashes"
VOCAB_SIZE = 997


@dataclass(frozen=True, slots=True)
class Size:
    """How big a worker is, and how fast."""

    num_pages: int
    page_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_model_len: int = 96
    vocab_size: int = VOCAB_SIZE
    max_tasks: int = 256
    step_s: float = 0.004
    token_s: float = 0.0002
    load_s: float = 0.3
    most_drafts: int = 0  # guesses that a step verifies for a sequence
    others: tuple[PageShape, ...] = ()  # groups of layers after the first
    adapters: tuple[Adapter, ...] = ()
    shares: tuple[Share, ...] = ONE_RANK  # what each of its ranks has of every page

    @property
    def layout(self) -> KvLayout:
        groups = (
            KvGroup("other", self.page_size // s.page_size, 1, 1, s.page_size, s.window, state_elements=2 * s.is_state)
            for s in self.others
        )
        return KvLayout("weights", 1, 1, 1, self.page_size, "float32", others=tuple(groups))

    @property
    def max_num_pages(self) -> int:
        return self.layout.paging.most_pages(self.max_model_len, self.max_num_batched_tokens)


def registration(me: Introduction, role: Role, size: Size) -> link.Register:
    """Return the first words of a worker that has yet to load."""
    peer = me.peer
    return link.Register(
        worker_id=peer.worker_id,
        incarnation=peer.incarnation,
        role=ROLE_NUMBERS[role],
        protocol_version=PROTOCOL_VERSION,
        model=MODEL,
        layout=layout_to_proto(me.layout),
        num_pages=size.num_pages,
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        handoff_address=peer.worker_id,
        adapters=[link.Adapter(name=each.name, digest=each.digest) for each in size.adapters],
    )
