"""The router's core with a hand on everything it hears."""

from collections.abc import Sequence
from dataclasses import replace
from struct import pack

from pdserve.base.ids import PROTOCOL_VERSION, Attempt, Incarnation, RequestId, WorkerId
from pdserve.base.roles import Role
from pdserve.capacity.wires import Delta
from pdserve.perfmodel.curve import Step
from pdserve.perfmodel.model import ENOUGH_STEPS
from pdserve.protocol.adapters import NO_ADAPTER
from pdserve.protocol.kvlayout import KvLayout
from pdserve.protocol.refusal import Refused
from pdserve.protocol.reports import Failure, Stage
from pdserve.protocol.sampling import PromptLogprobs, SamplingParams
from pdserve.router.config import Limits
from pdserve.router.placement.policies import POLICIES
from pdserve.router.placement.predict import Predictor
from pdserve.router.placement.routing import Decision, Demand, Group
from pdserve.router.requests.commands import CancelAttempt, Command, Deliver, End, Finished, Place
from pdserve.router.requests.core import RouterCore
from pdserve.router.requests.events import (
    AttemptFailed,
    Event,
    LinkId,
    PromptScored,
    Registration,
    RequestArrived,
    StageReached,
    StepReported,
    Tick,
)

LAYOUT = KvLayout("w", 1, 1, 8, 16, "float32")
STOP, LENGTH = 1, 2
PROMPT = (5, 6, 7)


def scored_of(request: RequestId, attempt: int, position: int, chosen: Sequence[float]) -> PromptScored:
    return PromptScored(
        request, Attempt(attempt), position, PromptLogprobs(pack(f"<{len(chosen)}f", *chosen), b"", b"")
    )


class Driver:
    """A core with a hand on everything it hears."""

    def __init__(
        self, limits: Limits | None = None, *, policy: str = "least_loaded", predictor: Predictor | None = None
    ) -> None:
        self.predictor = predictor or Predictor()
        self._policy = POLICIES[policy](self.predictor)
        self.core = RouterCore("m", limits or Limits(), self.decide, self.predictor)
        self.now_s = 100.0
        self.adapter = NO_ADAPTER  # of requests that come
        self.delivered: dict[tuple[RequestId, int], list[int]] = {}
        self.scored: dict[RequestId, list[float]] = {}  # log probabilities of prompt tokens
        self.ends: dict[RequestId, Finished | Refused] = {}
        self.last: list[Command] = []
        self._num_links = 0
        self._num_requests = 0

    def decide(self, groups: Sequence[Group], demand: Demand) -> Decision:
        return self._policy(groups, demand)

    def post(self, event: Event) -> list[Command]:
        self.last = self.core.handle(event, self.now_s)
        for command in self.last:
            match command:
                case Deliver(prompt_logprobs=logprobs) if logprobs is not None:
                    self.scored.setdefault(command.request_id, []).extend(each.chosen for each in logprobs.entries())
                case Deliver():
                    self.delivered.setdefault((command.request_id, command.index), []).extend(command.token_ids)
                case End():
                    assert command.request_id not in self.ends
                    self.ends[command.request_id] = command.outcome
        return self.last

    def attach(self, name: str, *, incarnation: int = 1, **changes: object) -> LinkId:
        self._num_links += 1
        role = {"p": Role.PREFILL, "m": Role.MIXED}.get(name[0], Role.DECODE)
        process = LinkId(self._num_links), WorkerId(name), Incarnation(incarnation), role
        told = Registration(*process, PROTOCOL_VERSION, True, "m", LAYOUT, 100, 8, 1000, f"{name}:1", 2048)
        self.post(replace(told, **changes))  # type: ignore[arg-type]
        return LinkId(self._num_links)

    def attach_again(self, link: LinkId, **changes: object) -> None:
        """Let a worker register again."""
        self.post(replace(self.core.workers.known(link).registration, **changes))  # type: ignore[arg-type]

    def pair(self) -> tuple[LinkId, LinkId]:
        return self.attach("p0"), self.attach("d0")

    def teach(self, prefill_token_s: float, decode_step_s: float) -> None:
        """Let the predictor see enough steps of every worker for a policy to refuse by it."""
        for worker in tuple(self.core.workers):
            for tokens in range(1, 4 * ENOUGH_STEPS + 1):
                prompt, answers = Step(tokens, tokens**2), Step(sequences=1, kv_tokens=tokens)
                self.post(StepReported(worker.link, [], prompt, prefill_token_s * tokens))
                if worker.role is Role.DECODE:
                    self.post(StepReported(worker.link, [], answers, decode_step_s))

    def arrive(
        self,
        *,
        priority: int = 0,
        deadline_in_s: float = 60.0,
        tenant: str = "salt",
        ttft_s: float | None = None,
        slo_s: float | None = None,
        prompt: Sequence[int] = PROMPT,
        **params: object,
    ) -> RequestId:
        """Let a request come. `slo_s`: the objective for both times."""
        self._num_requests += 1
        request_id = RequestId(self._num_requests.to_bytes(16))
        sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
        deadline_s = self.now_s + deadline_in_s
        slos_s = (slo_s, slo_s) if slo_s is not None else (ttft_s, None)
        asked = request_id, prompt, sampling, self.now_s, deadline_s, priority, tenant, *slos_s
        self.post(RequestArrived(*asked, adapter=self.adapter))
        return request_id

    def placed(self) -> Place:
        (place,) = self.placements()
        return place

    def placements(self) -> list[Place]:
        return [command for command in self.last if isinstance(command, Place)]

    def cancels(self) -> list[CancelAttempt]:
        return [command for command in self.last if isinstance(command, CancelAttempt)]

    def tokens(
        self, link: LinkId, request: RequestId, position: int, *ids: int, attempt: int = 0, index: int = 0, end: int = 0
    ) -> None:
        self.post(StepReported(link, [Delta(request, attempt, index, position, ids, end)]))

    def score(self, link: LinkId, request: RequestId, position: int, *chosen: float, attempt: int = 0) -> None:
        """Report log probabilities of a prompt's tokens."""
        self.post(StepReported(link, [], prompts=[scored_of(request, attempt, position, chosen)]))

    def stage(
        self, link: LinkId, request: RequestId, stage: Stage, age_s: float = 0.0, attempt: int = 0, **figures: float
    ) -> None:
        event = StageReached(link, request, Attempt(attempt), stage, age_s)
        self.post(replace(event, **figures))  # type: ignore[arg-type]

    def fail(self, link: LinkId, request: RequestId, failure: Failure, attempt: int = 0) -> None:
        self.post(AttemptFailed(link, request, Attempt(attempt), failure, "no luck"))

    def run(self, seconds: float) -> None:
        """Let time pass, and ring each alarm of the core when it is due."""
        until_s = self.now_s + seconds
        while (due_s := self.core.next_wakeup_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.post(Tick())
        self.now_s = until_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.post(Tick())

    def refusal(self, request: RequestId) -> Refused:
        outcome = self.ends[request]
        assert isinstance(outcome, Refused)
        return outcome

    def answer(self, request: RequestId) -> Finished:
        outcome = self.ends[request]
        assert isinstance(outcome, Finished)
        self.core.check_idle()
        return outcome


def placed_request(**terms: object) -> tuple[Driver, LinkId, LinkId, RequestId]:
    """Return a driver, its prefill and its decode worker, and a request that is placed on them."""
    d = Driver()
    prefill, decode = d.pair()
    return d, prefill, decode, d.arrive(**terms)  # type: ignore[arg-type]
