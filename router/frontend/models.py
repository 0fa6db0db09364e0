"""The models that a process serves at one address, each with all that its requests need.

Invariant: a request is accepted, tokenized, computed and counted by the model that it names, and by nothing of another
one. A name that no model serves is refused by the first one, which lists them all; so is a request without a name
where there are several.
"""

from collections.abc import Iterator, Sequence

from pdserve.base.errors import ConfigError, echo
from pdserve.base.values import value
from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.backend import Backend
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.intake import Intake
from pdserve.router.frontend.served import ServedModel


@value
class ModelRoute:
    """A model, and the way to its workers."""

    config: EndpointConfig  # as it holds for this model
    model: ServedModel
    backend: Backend
    clients: Clients


def check_names(models: Sequence[ServedModel]) -> None:
    """Raise ConfigError where two models have the same name."""
    names: set[str] = set()
    for model in models:
        for name in model.names:
            if name in names:
                raise ConfigError(f"models: {name!r} is the name of two; served_model_name gives one another name")
            names.add(name)


class Models:
    """Finds the intake of a model. What the process has once, such as counters of its port, is the first one's."""

    def __init__(self, intakes: Sequence[Intake]) -> None:
        self.first = intakes[0]
        self._intakes = tuple(intakes)
        self._by_name = {name: intake for intake in intakes for name in intake.model.names}
        for intake in intakes:
            intake.others = tuple(each.model.name for each in intakes if each is not intake)

    def __iter__(self) -> Iterator[Intake]:
        return iter(self._intakes)

    def of(self, name: str | None) -> Intake:
        """Return the intake that a request's model name leads to, which refuses a name that is not served."""
        known = self._by_name.get(name or "")
        return known or next((each for each in self._intakes if name in each.names), self.first)

    def shown(self, name: str) -> Intake:
        """Return the intake of a model to be shown, by default the first. RefusedError for a name that none has.

        Other names are not told: some of those who ask show no key.
        """
        intake = self.of(name)
        if name and name not in intake.names:
            raise RefusedError(Refused(Cause.MODEL, f"model: {echo(name, repr)} is not served here"))
        return intake

    @property
    def is_live(self) -> bool:
        return any(intake.backend.readiness().is_live for intake in self)

    @property
    def is_ready(self) -> bool:
        """Whether requests may come: some model's may."""
        return any(intake.backend.readiness().is_ready for intake in self)

    @property
    def can_serve(self) -> bool:
        return any(intake.backend.readiness().can_serve for intake in self)
