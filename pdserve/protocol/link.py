"""What both ends of link.proto share: numbers of its enumerations, names of processes and attempts, layouts.

Each end has its own half of the messages: `router/wire.py` and `worker/wire.py`.
"""

from pdserve.base.errors import ConfigError, PeerFault, ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.proto.v1 import handoff_pb2 as handoff
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.drafts import DraftSource
from pdserve.protocol.kvlayout import DTYPE_BYTES, PAGE_DIGESTS, SCALED, KvGroup, KvLayout, Tier
from pdserve.protocol.paging import PageShape, Paging
from pdserve.protocol.reports import Failure, Stage

ROLES = {link.Role.Value(f"ROLE_{role.name}"): role for role in Role}
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}
STAGES = {number: Stage[name.removeprefix("STAGE_")] for name, number in link.Stage.items() if number}
STAGE_NUMBERS = {stage: number for number, stage in STAGES.items()}
TIERS = {link.Tier.Value(f"TIER_{tier.name}"): tier for tier in Tier}
TIER_NUMBERS = {tier: number for number, tier in TIERS.items()}
FAILURES = {link.FailureCode.Value(f"FAILURE_CODE_{failure.name}"): failure for failure in Failure}
FAILURE_NUMBERS = {failure: number for number, failure in FAILURES.items()}
SOURCES: dict[int, DraftSource] = {
    link.DraftSource.Value(f"DRAFT_SOURCE_{source.name}"): source for source in DraftSource
}
SOURCE_NUMBERS = {source: number for number, source in SOURCES.items()}
REQUEST_ID_BYTES = 16
MAX_WORKER_ID_BYTES = 128
MAX_KV_GROUPS = 64
KV_PARTS = {1, 2}
_LAYOUT_FIELDS = tuple(name for name in KvLayout.__slots__ if name != "others")
_GROUP_FIELDS = ("name", "num_layers", "num_kv_heads", "head_dim", "page_size", "kv_parts", "state_elements")


def peer_from_proto(
    message: link.Register | link.WorkerRef | link.ProcessGone | handoff.Hello | handoff.HelloAck, field: str
) -> Peer:
    """Return the process that a message names, there called `field`; ProtocolError if it names none."""
    num_bytes = len(message.worker_id.encode())
    if not 0 < num_bytes <= MAX_WORKER_ID_BYTES:
        raise ProtocolError(f"{field}.worker_id: {num_bytes} bytes, 1 to {MAX_WORKER_ID_BYTES} are allowed")
    if not message.incarnation:
        raise ProtocolError(f"{field}.incarnation: 0 is nobody's", PeerFault.INCARNATION)
    return Peer(WorkerId(message.worker_id), Incarnation(message.incarnation))


def key_from_proto(
    message: link.SequenceSpec | link.Move | link.Share | link.Cancel | handoff.HandoffId,
) -> AttemptKey:
    """Return the attempt that a message names; ProtocolError if it names none."""
    num_bytes = len(message.request_id)
    if num_bytes != REQUEST_ID_BYTES:
        raise ProtocolError(f"request_id: {num_bytes} bytes, {REQUEST_ID_BYTES} are needed")
    return AttemptKey(RequestId(message.request_id), Attempt(message.attempt))


def layout_to_proto(layout: KvLayout) -> link.KvLayout:
    message = link.KvLayout(**{name: getattr(layout, name) for name in _LAYOUT_FIELDS})
    for group in layout.others:
        message.others.add(**{name: getattr(group, name) for name in _GROUP_FIELDS}, window=group.window or 0)
    return message


def layout_from_proto(message: link.KvLayout) -> KvLayout:
    """Return the layout that a peer reports; ProtocolError names the first impossible field."""
    if len(message.others) > MAX_KV_GROUPS:
        raise ProtocolError(f"layout.others: {len(message.others)} groups are over {MAX_KV_GROUPS}")
    others = tuple(map(_group, message.others))
    layout = KvLayout(**{name: getattr(message, name) for name in _LAYOUT_FIELDS}, others=others)
    if layout.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"layout.dtype: {layout.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if layout.page_digest not in PAGE_DIGESTS:
        raise ProtocolError(f"layout.page_digest: {layout.page_digest!r} is none of {', '.join(PAGE_DIGESTS)}")
    for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
        if getattr(layout, name) < 1:
            raise ProtocolError(f"layout.{name}: must be at least 1")
    if not {layout.kv_parts, *[group.kv_parts for group in others]} <= KV_PARTS:
        raise ProtocolError("layout.kv_parts: must be 1 or 2")
    if layout.dtype in SCALED and (layout.kv_parts == 1 or any(group.kv_parts == 1 for group in others)):
        raise ProtocolError(f"layout.dtype: {layout.dtype} is no type of latent rows")
    if layout.dtype in SCALED and any(group.state_elements for group in others):
        raise ProtocolError(f"layout.dtype: {layout.dtype} is no type of states")
    try:
        layout.paging  # noqa: B018 - checks page sizes
        layout.check()
    except ConfigError as error:
        raise ProtocolError(f"layout.{error}") from error
    return layout


def paging_from_proto(layout: link.KvLayout) -> Paging:
    """Return the page sizes and windows of a layout that a router has checked."""
    others = [PageShape(group.page_size, group.window or None, group.state_elements > 0) for group in layout.others]
    return Paging([PageShape(layout.page_size), *others])


def _group(message: link.KvGroup) -> KvGroup:
    for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
        if getattr(message, name) < 1:
            raise ProtocolError(f"layout.others.{name}: must be at least 1")
    return KvGroup(**{name: getattr(message, name) for name in _GROUP_FIELDS}, window=message.window or None)
