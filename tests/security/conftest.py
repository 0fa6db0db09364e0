from pathlib import Path

import pytest

from pdserve.launch.authority import Authority


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b"s" * 32)
    return path


@pytest.fixture
def authority() -> Authority:
    return Authority.new()
