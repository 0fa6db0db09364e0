"""What all bodies of requests over HTTP have in common: unknown fields are accepted, and named for a header."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from pdserve.protocol.refusal import invalid

WITHOUT_EFFECT = frozenset(  # OpenAI's fields that would not change any answer
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "verbosity"),
    }
)
Object = dict[str, Any]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    PARTS: ClassVar[tuple[str, ...]] = ()
    """Fields that are bodies themselves, and whose unknown fields are named."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Fields that would change the answer and are not supported, with the reason."""

    def check_refused(self, before: str = "") -> None:
        """Raise RefusedError for a field of REFUSED that asks for something. `before`: what its name begins with."""
        for name, value in (self.model_extra or {}).items():
            if name in self.REFUSED and value is not False and value not in (None, [], {}):
                raise invalid(f"{before}{name}", self.REFUSED[name])

    @property
    def ignored(self) -> list[str]:
        """The names of fields that were sent and are not known here; those of PARTS follow the fields' own."""
        given = (self.model_extra or {}).items()
        names = [name for name, value in given if value is not None and name not in WITHOUT_EFFECT]
        parts = [(part, getattr(self, part)) for part in self.PARTS]
        return names + [f"{part}.{name}" for part, of in parts if of is not None for name in of.ignored]
