"""The models that a process serves at one address, each with all that its requests need.

Invariant: a request is accepted, tokenized, computed and counted by the model that it names, and by nothing of another
one. A name that no model serves is refused before any of that; so is a request without a name where there are several.
"""

from collections.abc import Iterator, Sequence

from pdserve.base.errors import ConfigError, echo
from pdserve.base.values import value
from pdserve.protocol.refusal import Cause, Refused, RefusedError
from pdserve.router.config import EndpointConfig
from pdserve.router.frontend.backend import Backend
from pdserve.router.frontend.clients import Clients
from pdserve.router.frontend.intake import Intake, not_served
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

    def __iter__(self) -> Iterator[Intake]:
        return iter(self._intakes)

    def __len__(self) -> int:
        return len(self._intakes)

    def find(self, name: str) -> Intake | None:
        """Return the intake of the model, or of the adapter, that has this name; None if none has."""
        return self._by_name.get(name) or next((each for each in self if name in each.names), None)

    def of(self, name: str | None) -> Intake:
        """Return the intake of the name in a request. RefusedError, which lists the models, if none has it.

        A request may name none where one model is served.
        """
        found = self.find(name or "") if name or len(self) > 1 else self.first
        if found is None:
            raise not_served(name or "", [each.model.name for each in self])
        return found

    def shown(self, name: str) -> Intake:
        """Return the intake of a model to be shown, by default the first. RefusedError for a name that none has.

        It lists no models: some of those who ask show no key.
        """
        found = self.find(name) if name else self.first
        if found is None:
            raise RefusedError(Refused(Cause.MODEL, f"model: {echo(name, repr)} is not served here"))
        return found

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
