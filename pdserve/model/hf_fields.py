"""Read a Hugging Face config.json key by key; errors name the key."""

from collections.abc import Mapping
from typing import TypeVar

from pdserve.errors import ConfigError

_Value = TypeVar("_Value")


class Fields:
    """Typed look-ups in one JSON object. A key that is absent or null counts as not given."""

    def __init__(self, values: Mapping[str, object], within: str = "") -> None:
        self._values = values
        self._within = within

    def given(self, key: str) -> bool:
        """Say whether the key stands there at all, be it as null."""
        return key in self._values

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def optional_int(self, key: str) -> int | None:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise self._wrong(key, "an integer")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return self._or_default(key, self.optional_int(key), default)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise self._wrong(key, "a positive integer")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self._wrong(key, "a number")
        return None if value is None else float(value)

    def number(self, key: str, default: float | None = None) -> float:
        return self._or_default(key, self.optional_number(key), default)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool | None):
            raise self._wrong(key, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key)
        if not isinstance(value, str | None):
            raise self._wrong(key, "a string")
        return self._or_default(key, value, default)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self._wrong(key, "a list of strings")
        return tuple(str(item) for item in value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key that holds one id, a list of them, or nothing."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
            raise self._wrong(key, "a token id or a list of token ids")
        return ids

    def section(self, key: str) -> "Fields":
        value = self._values.get(key)
        if value is None:
            return Fields({}, f"{self._within}{key}.")
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Fields(value, f"{self._within}{key}.")

    def unsupported(self, key: str, supported: str) -> ConfigError:
        return ConfigError(f"{self._within}{key}: {self._values.get(key)!r} is not supported ({supported})")

    def _or_default(self, key: str, value: _Value | None, default: _Value | None) -> _Value:
        found = default if value is None else value
        if found is None:
            raise ConfigError(f"{self._within}{key}: missing from the model's config")
        return found

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self._within}{key}: {self._values.get(key)!r} is not {wanted}")
