"""Workers' cores, each able to hand off to each other one, with streams that deliver in any order between them."""

import random

from joined_cores import PAGE_SIZE, ROUTER, VOCAB, Joined, Node, attentive

from faultsim.engine import expected
from pdserve.base.ids import Attempt, AttemptKey, Incarnation, Peer, RequestId, WorkerId
from pdserve.engine.kvcache import KvCache
from pdserve.engine.scheduler import Limits, Scheduler
from pdserve.engine.sequence import Job
from pdserve.protocol.paging import Paging
from pdserve.protocol.prefix_hash import PrefixHasher
from pdserve.protocol.sampling import SamplingParams
from pdserve.worker.messages import Failed, Placed, RoleTaken, Tokens

MAX_MODEL_LEN = 40


def job(number: int, num_tokens: int, max_tokens: int = 8) -> Job:
    """Return a request with one continuation, and a prompt that no other has."""
    prompt = tuple((31 * number + place) % VOCAB for place in range(num_tokens))
    params = SamplingParams(max_tokens=max_tokens, seed=number)
    return Job(RequestId(number.to_bytes(16)), Attempt(0), prompt, num_tokens, params, (0,))


def wanted(each: Job) -> list[int]:
    """Return the tokens that one engine alone computes for a job."""
    return expected(each.token_ids, each.params.seed, each.params.max_tokens, VOCAB)


def core_worker(name: str, num_pages: int, max_num_seqs: int = 8, **rules: object) -> Node:
    limits = Limits(max_num_seqs, 64, MAX_MODEL_LEN, frozenset())
    scheduler = Scheduler(KvCache(num_pages, Paging.of(PAGE_SIZE), PrefixHasher(b"secret", "model", PAGE_SIZE)), limits)
    return Node(Peer(WorkerId(name), Incarnation(1)), scheduler, attentive(num_pages), **rules)


class WiredCores(Joined):
    """Cores by name, each able to hand off to each other one, and what a router sees of them."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        super().__init__(nodes)
        self.tokens: dict[tuple[AttemptKey, int], dict[int, int]] = {}  # of each continuation, by position
        self.finished: set[tuple[AttemptKey, int]] = set()
        self.failed: list[Failed] = []
        self.roles: list[tuple[str, RoleTaken]] = []

    def place(self, each: Job, source: str, target: str) -> None:
        """Send both halves of a hand-off, as a router does: neither waits for the other."""
        here, there = self.nodes[source].peer, self.nodes[target].peer
        self.queue(source, Placed(ROUTER, each, 1e9, target=there, target_address=target))
        self.queue(target, Placed(ROUTER, each, 1e9, source=here))

    def run(self, rng: random.Random, steps: int = 100_000) -> None:
        """Let anything that can happen happen, in random order, until nothing can."""
        for _ in range(steps):
            ready = [name for name, stream in self.streams.items() if stream]
            choice = rng.choice([*ready, *((name,) for name in self.nodes)])
            if len(choice) > 1:
                self.deliver(*choice)
            elif not self.step(choice[0]) and not ready and not sum(self.step(name) for name in self.nodes):
                return
        raise AssertionError("it never comes to rest")

    def report(self, worker: str, report: object) -> None:
        match report:
            case Tokens():
                self._take(report)
            case Failed():
                self.failed.append(report)
            case RoleTaken():
                self.roles.append((worker, report))

    def output(self, each: Job, index: int = 0) -> list[int]:
        drawn = self.tokens.get((AttemptKey(*each.key), index), {})
        return [drawn[position] for position in sorted(drawn)]

    def _take(self, tokens: Tokens) -> None:
        name = tokens.key, tokens.index
        drawn = self.tokens.setdefault(name, {})
        for position, token in enumerate(tokens.tokens, tokens.position):
            known = drawn.setdefault(position, token.token_id)  # both workers report a first token
            assert known == token.token_id, "a position was reported twice, and differs"
        if tokens.finish is not None:
            self.finished.add(name)
