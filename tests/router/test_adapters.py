"""A model's adapters: a request is placed only where both workers have loaded the one that it names."""

from itertools import product

import pytest
from router_driver import Driver

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import PROTOCOL_VERSION
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.adapters import MAX_ADAPTERS, NO_ADAPTER, Adapter
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.protocol.refusal import Cause, Refused
from pdserve.protocol.reports import Stage
from pdserve.router import wire
from pdserve.router.requests.commands import Move
from pdserve.router.requests.events import LinkId, LinkLost, MovesAsked

LONG = 400  # tokens of an answer that is worth a move
GOLD, BLUE = (Adapter(name, name.encode() * 8) for name in ("gold", "blue"))


def test_a_request_goes_to_workers_that_have_loaded_its_adapter() -> None:
    d = Driver()
    d.attach("p0")
    d.attach("d0")
    p1, d1 = d.attach("p1", adapters=(GOLD,)), d.attach("d1", adapters=(BLUE, GOLD))
    d.adapter = GOLD.digest
    for _ in range(4):
        d.arrive()
        place = d.placed()
        assert place.prefill is not None
        assert place.decode is not None
        assert (place.prefill.link, place.decode.link) == (p1, d1)
        assert place.spec.scope == CacheScope("salt", GOLD.digest)


def test_a_request_waits_for_an_adapter_that_one_side_has_not_loaded() -> None:
    d = Driver()
    d.attach("p0")
    d.attach("p1", adapters=(BLUE,))
    d.attach("d0", adapters=(BLUE,))
    d1 = d.attach("d1")
    d.adapter = GOLD.digest
    request = d.arrive()
    assert not d.placements()
    (waits,) = [each.waits_for for each in d.core.requests()]
    lacks = "p0: it has not loaded this adapter; p1: it has not loaded this adapter"
    assert waits == Refused(Cause.NO_PREFILL, f"no prefill worker is ready ({lacks})")
    d.attach("p2", adapters=(GOLD,))
    assert not d.placements()
    d.attach_again(d1, adapters=(GOLD,))
    assert d.placed().spec.request_id == request


def test_requests_without_an_adapter_go_anywhere() -> None:
    d = Driver()
    d.attach("p0", adapters=(GOLD,))
    d.attach("d0")
    d.arrive()
    assert d.placed().spec.scope == CacheScope("salt", NO_ADAPTER)


@pytest.mark.parametrize("has", [False, True])
def test_a_continuation_moves_only_to_a_worker_that_has_loaded_its_adapter(*, has: bool) -> None:
    d = Driver()
    p0, d0 = d.attach("p0", adapters=(GOLD,)), d.attach("d0", adapters=(GOLD,))
    d.adapter = GOLD.digest
    request = d.arrive(max_tokens=LONG)
    d.tokens(p0, request, 0, 1)
    d.stage(d0, request, Stage.COMMITTED)
    d.tokens(d0, request, 1, 2)
    d1 = d.attach("d1", adapters=(GOLD,) if has else (BLUE,))
    d.post(MovesAsked(d0, d1))
    assert [command.target.link for command in d.last if isinstance(command, Move)] == [d1] * has


def test_of_two_contents_of_one_name_that_of_the_first_worker_counts() -> None:
    d = Driver()
    newer = Adapter("gold", b"newer" + bytes(27))
    first = d.attach("d0", adapters=(GOLD,))
    second = d.attach("d1", adapters=(newer, BLUE))
    assert d.core.workers.adapters() == {"gold": GOLD.digest, "blue": BLUE.digest}
    d.attach_again(first, adapters=())
    assert d.core.workers.adapters() == {"gold": newer.digest, "blue": BLUE.digest}
    d.post(LinkLost(second, "gone"))
    assert not d.core.workers.adapters()


def test_equal_prompts_are_no_match_for_another_adapter() -> None:
    d = Driver()
    d.attach("p0", adapters=(GOLD, BLUE))
    d.attach("d0", adapters=(GOLD, BLUE))
    prompt, hashes = list(range(100)), []
    for tenant, d.adapter in product(("a", "b"), (NO_ADAPTER, GOLD.digest, BLUE.digest)):
        request = d.core.find(d.arrive(tenant=tenant, prompt=prompt))
        assert request is not None
        hashes.append(request.hashes)
    assert len(set(hashes)) == len(hashes)


REGISTER = link.Register(worker_id="w", incarnation=1, role=link.ROLE_DECODE, protocol_version=PROTOCOL_VERSION)


@pytest.mark.parametrize(
    ("adapters", "fault"),
    [
        ([("a", bytes(31))], "a has a digest of 31 bytes"),
        ([("", bytes(32))], "names have to be of 1 to 128 bytes"),
        ([("é" * 65, bytes(32))], "names have to be of 1 to 128 bytes"),
        ([("a", bytes(32)), ("a", b"b" * 32)], "a name is there twice"),
        ([(str(number), bytes(32)) for number in range(MAX_ADAPTERS + 1)], "257, 256 are allowed"),
    ],
)
def test_adapters_that_cannot_be_are_refused(adapters: list[tuple[str, bytes]], fault: str) -> None:
    register = link.Register()
    register.CopyFrom(REGISTER)
    register.adapters.extend(link.Adapter(name=name, digest=digest) for name, digest in adapters)
    with pytest.raises(ProtocolError, match=f"register.adapters: {fault}"):
        wire.worker_events(LinkId(1), link.AttachRequest(register=register))
