"""A report of a process's end that a router refuses is logged; that no router is there is not."""

import logging
from typing import cast

import grpc
import pytest

from pdserve.base.ids import Incarnation
from pdserve.launch.plan import ChildSpec
from pdserve.launch.supervisor import ChildExit, report_end
from pdserve.net.operator_client import AdminClient


class Refusing:
    """A router that answers with a status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def report_gone(self, *_: object, **__: object) -> None:
        raise grpc.aio.AioRpcError(self._code, grpc.aio.Metadata(), grpc.aio.Metadata(), "because")


@pytest.mark.parametrize(("code", "is_logged"), [("UNAVAILABLE", 0), ("DEADLINE_EXCEEDED", 0), ("UNAUTHENTICATED", 1)])
async def test_a_refused_report_is_logged(code: str, is_logged: int, caplog: pytest.LogCaptureFixture) -> None:
    exit_ = ChildExit(ChildSpec("decode-0", "decode", ()), Incarnation(1), 1, None)
    with caplog.at_level(logging.ERROR):
        await report_end(cast("AdminClient", Refusing(grpc.StatusCode[code])), exit_)
    assert caplog.text.count(f"the end of decode-0 is not reported: {code}, because") == is_logged
