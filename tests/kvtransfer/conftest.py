"""Kinds of movers; processes take long to start, so tests share them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from long_cases import long
from mover_settings import Idle, Setting, setting_of
from scripted_backend import Rig, scripted_rig

(STAGED,) = long("staged")  # its ends and waits are the other collective mover's


@pytest.fixture(scope="package")
def idle() -> Iterator[Idle]:
    """Target processes for each kind of mover, ended after the last test."""
    idle: Idle = {"loopback": [], "nixl-shm": [], "nixl-tcp": [], "driven-tcp": [], "collective": [], "staged": []}
    yield idle
    for target in (target for targets in idle.values() for target in targets):
        assert target.process is not None
        target.process.communicate()
        assert target.process.returncode == 0


# Of each library one mover is in each run; test_movers_and_processes has the other two over TCP.
@pytest.fixture(params=["loopback", "nixl-shm", *long("nixl-tcp", "driven-tcp"), "collective", STAGED])
def setting(request: pytest.FixtureRequest, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of(request.param, idle, tmp_path) as setting:
        yield setting


@pytest.fixture(params=[*long("nixl-shm"), "nixl-tcp", "driven-tcp", *long("collective"), STAGED])
def remote(request: pytest.FixtureRequest, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of(request.param, idle, tmp_path) as setting:
        yield setting


@pytest.fixture
def loopback(idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of("loopback", idle, tmp_path) as setting:
        yield setting


@pytest.fixture(params=["nixl-tcp", "driven-tcp", "collective", STAGED])
def tcp(request: pytest.FixtureRequest, idle: Idle, tmp_path: Path) -> Iterator[Setting]:
    with setting_of(request.param, idle, tmp_path) as setting:
        yield setting


@pytest.fixture
def rig() -> Iterator[Rig]:
    with scripted_rig() as rig:
        yield rig
