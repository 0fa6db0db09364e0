"""Page layouts as messages."""

from pdserve.errors import ProtocolError
from pdserve.kvlayout import DTYPE_BYTES, PAGE_DIGESTS, KvLayout
from pdserve.proto.v1 import link_pb2 as link


def layout_to_proto(layout: KvLayout) -> link.KvLayout:
    return link.KvLayout(**{name: getattr(layout, name) for name in KvLayout.__slots__})


def layout_from_proto(message: link.KvLayout) -> KvLayout:
    """Return the layout a peer claims; ProtocolError names a field that no layout has."""
    layout = KvLayout(**{name: getattr(message, name) for name in KvLayout.__slots__})
    if layout.dtype not in DTYPE_BYTES:
        raise ProtocolError(f"layout.dtype: {layout.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    if layout.page_digest not in PAGE_DIGESTS:
        raise ProtocolError(f"layout.page_digest: {layout.page_digest!r} is none of {', '.join(PAGE_DIGESTS)}")
    for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "tp_size"):
        if getattr(layout, name) < 1:
            raise ProtocolError(f"layout.{name}: must be at least 1")
    return layout
