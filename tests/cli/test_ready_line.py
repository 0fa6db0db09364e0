"""What `pdserve up` says once a cluster serves."""

import pytest

from pdserve.cli.running import _pool
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.link import layout_to_proto

LAYOUT = layout_to_proto(KvLayout("w", 1, 1, 8, 16, "float32"))


@pytest.mark.parametrize(
    ("num_pages", "max_model_len", "shown"),
    [
        (100, 1024, "1 decode, 100 pages of 16 tokens"),
        (10, 160, "1 decode, 10 pages of 16 tokens, which limit sequences to 160 tokens"),
    ],
)
def test_a_length_that_the_pages_cut_is_said(num_pages: int, max_model_len: int, shown: str) -> None:
    assert _pool("decode", [link.Register(layout=LAYOUT, num_pages=num_pages, max_model_len=max_model_len)]) == shown
