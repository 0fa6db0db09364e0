"""Typed look-ups in a model's config.json and in other JSON objects. Free of torch."""

import json
from collections.abc import Mapping
from typing import TypeVar

from pdserve.base.errors import ConfigError

_Value = TypeVar("_Value")
MOST = 2**24  # of any size in a config: above the vocabulary and the context of any model
MOST_LAYERS = 4096


class Fields:
    """Typed look-ups in one JSON object; errors name the key. A key that is absent or null counts as not given.

    An object remembers which keys were looked up: the others are `unread`.
    """

    def __init__(self, values: Mapping[str, object], within: str = "") -> None:
        self._values = values
        self._within = within
        self._read = set[str]()

    def given(self, key: str) -> bool:
        """Say whether the key is there at all, even as null."""
        return key in self._values

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def optional_int(self, key: str) -> int | None:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise self._wrong(key, "an integer")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return self._or_default(key, self.optional_int(key), default)

    def positive(self, key: str, default: int | None = None, most: int = MOST) -> int:
        value = self.integer(key, default)
        if not 1 <= value <= most:
            raise self._wrong(key, f"an integer from 1 to {most}")
        return value

    @property
    def num_layers(self) -> int:
        """Return how many layers a model has."""
        return self.positive("num_hidden_layers", most=MOST_LAYERS)

    def optional_number(self, key: str) -> float | None:
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self._wrong(key, "a number")
        try:
            return None if value is None else float(value)
        except OverflowError as error:
            raise self._wrong(key, "a number that a float can be") from error

    def number(self, key: str, default: float | None = None) -> float:
        return self._or_default(key, self.optional_number(key), default)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; ConfigError if it is missing."""
        value = self._or_default(key, self._value(key), None)
        if not isinstance(value, list | tuple) or not all(type(item) in (int, float) for item in value):
            raise self._wrong(key, "a list of numbers")
        try:
            return tuple(float(item) for item in value)
        except OverflowError as error:
            raise self._wrong(key, "a list of numbers that a float can be") from error

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if not isinstance(value, bool | None):
            raise self._wrong(key, "true or false")
        return default if value is None else value

    def truth(self, key: str, default: bool) -> bool:
        """Return a flag that some files have as a number."""
        return self.flag(key, default) if isinstance(self._value(key), bool) else self.number(key, default) != 0

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key)
        if not isinstance(value, str | None):
            raise self._wrong(key, "a string")
        return self._or_default(key, value, default)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self._wrong(key, "a list of strings")
        return tuple(str(item) for item in value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return the ids of a key that holds one id, a list of them, or nothing."""
        value = self._value(key)
        if value is None:
            return ()
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(id_, int) and not isinstance(id_, bool) and id_ >= 0 for id_ in ids):
            raise self._wrong(key, "a token id or a list of token ids")
        return ids

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._value(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise self._wrong(key, "a list of integers")
        return tuple(value)

    def section(self, key: str) -> "Fields":
        value = self._value(key)
        if value is None:
            return Fields({}, f"{self._within}{key}.")
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Fields(value, f"{self._within}{key}.")

    def must_be(self, key: str, *values: object) -> None:
        """Raise ConfigError if the key is given with none of these values."""
        if self._value(key) not in (None, *values):
            raise self.unsupported(key, json.dumps(values[0]))

    def skip(self, key: str) -> None:
        """Count a key as looked up: another one says the same."""
        self._read.add(key)

    def unread(self) -> list[str]:
        """Return the keys that are given and were never looked up."""
        return [key for key in self._values if self.has(key) and key not in self._read]

    def unsupported(self, key: str, supported: str) -> ConfigError:
        return ConfigError(f"{self._within}{key}: {self._value(key)!r} is not supported ({supported})")

    def _value(self, key: str) -> object:
        self._read.add(key)
        return self._values.get(key)

    def _or_default(self, key: str, value: _Value | None, default: _Value | None) -> _Value:
        found = default if value is None else value
        if found is None:
            raise ConfigError(f"{self._within}{key}: missing from the model's config")
        return found

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        return ConfigError(f"{self._within}{key}: {self._value(key)!r} is not {wanted}")
