"""What routers ask of a worker, as it is read from messages: each field that cannot be is named."""

import pytest

from pdserve.base.errors import ProtocolError
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.inference import params_from_proto, params_to_proto
from pdserve.protocol.prefix_hash import CacheScope
from pdserve.protocol.sampling import SamplingParams
from pdserve.protocol.token_ids import to_wire
from pdserve.worker import wire
from pdserve.worker.messages import Fetch, MoveAsked, Placed, RoleGiven, RouterRef, ShareAsked

ROUTER, ID = RouterRef(7), bytes(range(16))
PEER = Peer(WorkerId("t"), Incarnation(5))
TARGET = link.WorkerRef(worker_id="t", incarnation=5, handoff_address="host:1")
MOVE = link.Move(request_id=ID, attempt=1, index=2, new_attempt=3, target=TARGET, num_tokens=9)
SHARE = link.Share(request_id=ID, attempt=1, token_ids=to_wire([4, 5]), cache_salt="s", target=TARGET, within_ms=500)
KEY = AttemptKey(RequestId(ID), Attempt(1))
FETCH = link.Fetch(holder=TARGET, num_tokens=64, within_ms=250)


def place(**fields: object) -> link.Place:
    sampling = inference.SamplingParams(max_tokens=1, n=1)
    spec = link.SequenceSpec(request_id=ID, token_ids=to_wire([1]), num_prompt_tokens=1, sampling=sampling)
    return link.Place(spec=spec, **fields)


def read(**message: object) -> object:
    return wire.event(link.AttachResponse(**message), ROUTER, 10.0)


def test_a_move_names_what_runs_and_where_it_goes() -> None:
    asked = MoveAsked(ROUTER, KEY, 2, Attempt(3), PEER, "host:1", num_tokens=9)
    assert read(move=MOVE) == asked


def test_a_share_has_a_deadline_on_the_workers_clock() -> None:
    asked = read(share=SHARE)
    assert isinstance(asked, ShareAsked)
    assert (list(asked.token_ids), asked.deadline_s) == ([4, 5], 10.5)
    assert (asked.key, asked.scope, asked.target, asked.target_address) == (KEY, CacheScope("s"), PEER, "host:1")


def test_an_adapter_is_named_by_a_digest_or_not_at_all() -> None:
    job, share = place(), link.Share()
    share.CopyFrom(SHARE)
    for digest in (b"", bytes(range(32))):
        job.spec.adapter = share.adapter = digest
        placed, asked = read(place=job), read(share=share)
        assert isinstance(placed, Placed)
        assert isinstance(asked, ShareAsked)
        assert (placed.job.scope.adapter, asked.scope.adapter) == (digest, digest)
    for message, field in ((job, "place"), (share, "share")):
        job.spec.adapter = share.adapter = bytes(31)
        with pytest.raises(ProtocolError, match="adapter: 31 bytes, a digest has 32"):
            read(**{field: message})


def test_a_role_comes_with_its_epoch() -> None:
    assert read(set_role=link.SetRole(role=link.ROLE_MIXED, epoch=3)) == RoleGiven(Role.MIXED, 3)


def test_a_job_may_name_room_for_more_tokens_and_pages_to_fetch() -> None:
    fetching, moving = read(place=place(fetch=FETCH)), read(place=place(source=TARGET, extra_tokens=32))
    assert isinstance(fetching, Placed)
    assert isinstance(moving, Placed)
    assert fetching.fetch == Fetch(PEER, 64, 10.25)
    assert (moving.source, moving.extra_tokens) == (PEER, 32)


def without(message: object, **fields: object) -> object:
    """Return a copy of a message with other fields, "target__x" for those of its target."""
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        *path, last = name.split("__")
        part = copy
        for each in path:
            part = getattr(part, each)
        setattr(part, last, value)
    return copy


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"move": without(MOVE, request_id=b"short")}, "request_id: 5 bytes"),
        ({"move": without(MOVE, new_attempt=1)}, "new_attempt: 1 is not above attempt 1"),
        ({"move": without(MOVE, num_tokens=0)}, r"move\.num_tokens: 0"),
        ({"move": without(MOVE, target__incarnation=0)}, r"target\.incarnation: 0"),
        ({"move": without(MOVE, target__worker_id=129 * "w")}, r"target\.worker_id: 129 bytes"),
        ({"process_gone": link.ProcessGone(worker_id="d0")}, r"process_gone\.incarnation: 0"),
        ({"move": without(MOVE, target__handoff_address="")}, r"target\.handoff_address: empty"),
        ({"share": without(SHARE, request_id=b"")}, "request_id: 0 bytes"),
        ({"share": without(SHARE, target__handoff_address="")}, r"target\.handoff_address: empty"),
        ({"share": without(SHARE, token_ids=b"123")}, r"share\.token_ids: 3 bytes"),
        ({"share": without(SHARE, token_ids=bytes(4 * (wire.MAX_TOKEN_IDS + 1)))}, r"share\.token_ids: .* limit is"),
        ({"set_role": link.SetRole(epoch=1)}, r"set_role\.role: 0 is unknown"),
        ({"set_role": link.SetRole(role=link.ROLE_DECODE)}, r"set_role\.epoch: 0"),
        ({"place": place(source=without(TARGET, incarnation=0))}, r"source\.incarnation: 0"),
        ({"place": place(target=without(TARGET, handoff_address=""))}, r"target\.handoff_address: empty"),
        ({"place": place(fetch=link.Fetch(holder=TARGET))}, r"fetch\.num_tokens: 0"),
        ({"place": place(fetch=FETCH, source=TARGET)}, "fetch: the prompt comes from a source"),
        ({"place": place(extra_tokens=1)}, "extra_tokens: 1, and no source"),
        ({"place": place(fetch=link.Fetch(num_tokens=4))}, r"fetch\.holder\.worker_id: 0 bytes"),
    ],
)
def test_a_field_that_cannot_be_is_named(message: dict[str, object], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        read(**message)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.5, 3, 0.75, 0.25, 1.5, -0.5, 2.0, ((2, -1.0), (7, 0.5)), 2**63, 0, 9, 4, (5, 6), True, 2),
    ],
)
def test_a_worker_samples_as_the_router_asks(params: SamplingParams) -> None:
    assert params_from_proto(params_to_proto(params)) == params
