"""What all bodies of requests over HTTP have in common: unknown fields are accepted, and named for a header."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

WITHOUT_EFFECT = frozenset(  # OpenAI's fields that would not change any answer
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "verbosity"),
    }
)
Object = dict[str, Any]


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    PARTS: ClassVar[tuple[str, ...]] = ()
    """Fields that are bodies themselves, and whose unknown fields are named."""

    @property
    def ignored(self) -> list[str]:
        """The names of fields that were sent and are not known here; those of PARTS follow the fields' own."""
        given = (self.model_extra or {}).items()
        names = [name for name, value in given if value is not None and name not in WITHOUT_EFFECT]
        parts = [(part, getattr(self, part)) for part in self.PARTS]
        return names + [f"{part}.{name}" for part, of in parts if of is not None for name in of.ignored]
