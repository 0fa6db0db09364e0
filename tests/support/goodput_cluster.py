"""A router with the goodput policy over workers that do nothing but what a test reports of them."""

import random

from router_driver import LAYOUT, Driver

from pdserve.base.ids import Incarnation, RequestId
from pdserve.base.roles import Role
from pdserve.perfmodel.curve import Curve, DecodePiece, Step, StepCosts
from pdserve.protocol.refusal import Refused
from pdserve.protocol.sampling import SamplingParams
from pdserve.router.config import Limits
from pdserve.router.placement.predict import Predictor
from pdserve.router.requests.commands import Command, End, Place
from pdserve.router.requests.events import LinkId, RequestArrived, StepReported, Tick

__all__ = ["COSTS", "LAYOUT", "Cluster", "placed", "refused", "refused_in_the_end"]

COSTS = StepCosts(Curve(0.02, 1e-4, 0.0), (DecodePiece(None, Curve(0.02, 1e-3, 1e-7)),))
SIZE = {"num_pages": 1000, "max_num_seqs": 32, "max_model_len": 4096, "max_num_batched_tokens": 1024}


class Cluster(Driver):
    """A router's core with workers that do nothing, and a model that has seen enough."""

    def __init__(
        self, policy: str = "goodput", workers: str = "p0 d0", local: bool = False, knows: bool = True
    ) -> None:
        limits, predictor = Limits(local_prefill=local, pool_grace_s=0), Predictor(dict.fromkeys(Role, COSTS))
        super().__init__(limits, policy=policy, predictor=predictor)
        self.links: dict[str, LinkId] = {}
        self.count = 0
        for name in workers.split():
            self.attach(name)
        if knows:
            self.teach()

    def attach(self, name: str) -> None:
        self.links[name] = super().attach(name, incarnation=Incarnation(len(self.links) + 1), **SIZE)

    def predicted_s(self, place: Place) -> tuple[float, float]:
        """Return the times to first token and per token that were predicted for a request."""
        ledger = self.core.placements.requests[place.spec.request_id].ledger
        assert ledger.predicted_ttft_ms is not None
        assert ledger.predicted_tpot_ms is not None
        return ledger.predicted_ttft_ms / 1e3, ledger.predicted_tpot_ms / 1e3

    def teach(self) -> None:
        for name, link in self.links.items():
            for i in range(64):
                prefill = Step(100 + i, (100 + i) ** 2)
                decode = Step(sequences=1 + i % 8, kv_tokens=100 * i)
                for step in [prefill] if name[0] == "p" else [decode]:
                    self.post(StepReported(link, [], step, COSTS.seconds(step)))
                if name[0] != "p":
                    self.post(StepReported(link, [], prefill, COSTS.seconds(prefill)))

    def arrive(
        self, num_tokens: int = 1000, ttft_s: float | None = None, tpot_s: float | None = None, **terms: object
    ) -> list[Command]:
        self.count += 1
        tokens = terms.pop("tokens", [self.count] * num_tokens)
        params = SamplingParams(max_tokens=int(str(terms.pop("max_tokens", 100))))
        event = RequestArrived(
            request_id=RequestId(random.Random(self.count).randbytes(16)),
            token_ids=tokens,  # type: ignore[arg-type]
            params=params,
            received_s=self.now_s,
            deadline_s=self.now_s + 60,
            ttft_slo_s=ttft_s,
            tpot_slo_s=tpot_s,
            **terms,  # type: ignore[arg-type]
        )
        return self.post(event)


def placed(commands: list[Command]) -> Place:
    (place,) = [command for command in commands if isinstance(command, Place)]
    return place


def refused(commands: list[Command]) -> Refused:
    (end,) = [command for command in commands if isinstance(command, End)]
    assert isinstance(end.outcome, Refused)
    return end.outcome


def refused_in_the_end(cluster: Cluster, commands: list[Command]) -> Refused:
    """Let time pass until a request that was held is refused."""
    while not commands:
        due_s = cluster.core.next_wakeup_s()
        assert due_s is not None
        cluster.now_s = max(due_s, cluster.now_s)
        commands = cluster.post(Tick())
    return refused(commands)
