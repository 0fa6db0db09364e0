"""A worker computes what has to match a grammar with that grammar's masks, or not at all."""

import asyncio

import pytest
from default_rules import default_rules
from small_vocabulary import END, small_tokenizer

from pdserve.base.errors import GrammarError
from pdserve.base.ids import Attempt, RequestId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.masks import token_masks
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.grammar.compiler import Compiler
from pdserve.grammar.matching import Grammars
from pdserve.protocol.paging import Paging
from pdserve.protocol.reports import Failure
from pdserve.protocol.sampling import SamplingParams, StructuredOutput
from pdserve.worker.core import WorkerCore
from pdserve.worker.inbox import Inbox, Listener
from pdserve.worker.messages import Failed, Placed, RouterRef

TOKENIZER = small_tokenizer()
VOCAB = TOKENIZER.vocab_size
PARAMS = SamplingParams(max_tokens=4, seed=1, structured_output=StructuredOutput("choice", ("ab", "aab")))
PLACED = Placed(RouterRef(1), Job(RequestId(b"r" * 16), Attempt(0), (1, 2, 3), 3, PARAMS, (0,)), 1e9, None)


def core() -> WorkerCore:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=96, eos_token_ids=frozenset({END}))
    return WorkerCore(Scheduler(KvCache(16, Paging.of(4), None), limits), VOCAB, 64, b"secret", default_rules())


def test_a_job_whose_masks_nobody_makes_is_refused() -> None:
    (failed,) = [command for command in core().handle(PLACED, 0.0) if isinstance(command, Failed)]
    assert failed.code is Failure.INVALID
    assert failed.reason.startswith("structured_output: ")


async def test_a_job_gets_its_matcher_as_it_arrives_and_wakes_the_worker_when_that_is_ready() -> None:
    inbox, loop = Inbox(), asyncio.get_running_loop()
    grammars = Grammars(
        lambda: Compiler(TOKENIZER.to_json(), (END,)), lambda: loop.call_soon_threadsafe(inbox.wake) and None
    )
    async with asyncio.TaskGroup() as tasks:
        listener = Listener(inbox, tasks)
        listener.open_grammars(grammars)
        await listener.offer(PLACED)
        (placed,) = inbox.drain()
        worker = core()
        assert not [each for each in worker.handle(placed, 0.0) if isinstance(each, Failed)]
        while (plan := worker.plan(0.0)) is None:
            await inbox.wait(20)
            inbox.drain()
        masks = token_masks(plan.chunks[0].samples, VOCAB, (END,))
        assert masks.rows == (0,)
    grammars.close()


async def test_a_grammar_that_does_not_compile_keeps_nobody_waiting() -> None:
    grammars = Grammars(lambda: Compiler(TOKENIZER.to_json(), ()), lambda: None)
    matcher = grammars.compile(StructuredOutput("choice", ("ab",)))()
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        matcher.fill([], token_masks([], VOCAB, ()).bits)
    assert matcher.is_ready
    grammars.close()
