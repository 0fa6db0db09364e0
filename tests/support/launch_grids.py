"""Which grids a kernel is launched with."""

from types import ModuleType

import pytest


class Grids:
    """Stands in for a kernel: runs it, and keeps the grids of its launches."""

    def __init__(self, kernel: object) -> None:
        self._kernel = kernel
        self.seen: list[tuple[int, ...]] = []

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> "Grids":
        """Return the grids of a module's kernel from now on."""
        grids = cls(getattr(module, name))
        monkeypatch.setattr(module, name, grids)
        return grids

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.seen.append(grid)
        return self._kernel[grid]  # type: ignore[index]
