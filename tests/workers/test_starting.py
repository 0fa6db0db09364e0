"""Prompts that hold pages before they are granted any leave room for others, and start as soon as they have room."""

from default_rules import default_rules

from faultsim.engine import FakeRunner
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.ids import Attempt, Incarnation, RequestId, WorkerId
from pdserve.kvtransfer.session import Peer
from pdserve.sampling import SamplingParams
from pdserve.worker.core import WorkerCore
from pdserve.worker.messages import Placed, RouterRef

PAGE_SIZE, NUM_PAGES, VOCAB = 4, 16, 100
PEER = Peer(WorkerId("decode"), Incarnation(1))


def test_a_prompt_that_waits_for_room_starts_with_the_step_after_the_one_that_made_it() -> None:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=40, eos_token_ids=frozenset(range(VOCAB)))
    scheduler = Scheduler(KvCache(NUM_PAGES, PAGE_SIZE, None), limits)
    runner = FakeRunner(NUM_PAGES, PAGE_SIZE, VOCAB)
    core = WorkerCore(scheduler, VOCAB, runner.page_bytes, b"secret", default_rules(max_tasks=8))
    for number in range(2):  # six pages are left for prompts without a grant: one of these fits
        tokens = tuple(range(5 * PAGE_SIZE))
        job = Job(RequestId(number.to_bytes(16)), Attempt(0), tokens, len(tokens), SamplingParams(max_tokens=4), (0,))
        core.handle(Placed(RouterRef(1), job, 1e9, target=PEER, target_address="host:1"), 0.0)
    for _ in range(2):
        plan = core.plan(0.0)
        assert plan is not None, "nothing else happens that would start the second one"
        assert len(plan.chunks) == 1
        core.commit(plan, runner.run(plan), 0.0)  # its first token ends it
    assert core.idle
