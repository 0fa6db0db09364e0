"""A job for a vector ends with it, keeps nothing, and is refused where no vectors are made."""

from dataclasses import replace

import pytest
from lone_core import ROUTER, LoneCore, job, key_of

from faultsim.engine import expected_vector
from pdserve.base.errors import ProtocolError
from pdserve.engine.scheduler import Limits
from pdserve.engine.sequence import Finish, Job
from pdserve.proto.v1 import link_pb2 as link
from pdserve.protocol.inference import params_to_proto
from pdserve.protocol.pooling import Pooling
from pdserve.protocol.reports import Failure
from pdserve.protocol.sampling import SamplingParams
from pdserve.protocol.token_ids import to_wire
from pdserve.worker import wire
from pdserve.worker.messages import Cancelled, Failed, Tokens


def asked(number: int, num_tokens: int, pooling: Pooling) -> Job:
    return replace(job(number, num_tokens), params=SamplingParams(max_tokens=1, pooling=pooling))


@pytest.mark.parametrize("pooling", [Pooling("last"), Pooling("mean")])
def test_a_vector_is_reported_once_and_its_pages_are_free(pooling: Pooling) -> None:
    lone = LoneCore(step_tokens=7)
    lone.place(asked(1, 30, pooling))
    reports = [command for _ in range(5) for command in lone.step()]
    (told,) = [each for each in reports if isinstance(each, Tokens)]
    vector = expected_vector(range(30), pooling)
    assert told == Tokens(ROUTER, key_of(1), 0, 0, (), Finish.STOP, vector)
    assert lone.core.idle
    assert lone.core.plan(0.0) is None
    assert lone.cache.pool.num_free == lone.cache.pool.num_pages


def test_a_cancelled_job_reports_no_vector() -> None:
    lone = LoneCore(step_tokens=7)
    lone.place(asked(1, 30, Pooling("mean")))
    lone.step()
    lone.handle(Cancelled(*key_of(1)))
    assert lone.core.idle
    assert lone.cache.pool.num_free == lone.cache.pool.num_pages


def test_what_makes_no_vectors_refuses_them() -> None:
    lone = LoneCore()
    lone.scheduler.limits = replace(lone.scheduler.limits, can_pool=False)
    (failed,) = lone.place(asked(1, 10, Pooling("last")))
    assert failed == Failed(
        ROUTER, key_of(1), Failure.INVALID, "pooling: what computes here makes no vectors of prompts"
    )
    assert Limits(1, 1, 1, frozenset()).can_pool
    lone.place(job(2, 10))
    assert lone.core.has_task(key_of(2))


def test_nothing_of_a_vector_is_handed_over() -> None:
    params = params_to_proto(SamplingParams(max_tokens=1, pooling=Pooling("last")))
    spec = link.SequenceSpec(request_id=bytes(16), token_ids=to_wire([1, 2]), num_prompt_tokens=2, sampling=params)
    target = link.WorkerRef(worker_id="d", incarnation=5, handoff_address="host:1")
    with pytest.raises(ProtocolError, match="nothing of it is handed over"):
        wire.event(link.AttachResponse(place=link.Place(spec=spec, target=target)), ROUTER, 0.0)
