"""Files that a configuration names, and ports of this machine."""

import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pdserve.base.errors import ConfigError
from pdserve.base.yaml_models import read_model
from pdserve.cli.options import OperatorFlags
from pdserve.cli.processes import known_settings
from pdserve.doctor import gathering
from pdserve.doctor.cluster import cluster_checks
from pdserve.doctor.gathering import gather_listeners
from pdserve.doctor.machine import (
    Finding,
    Level,
    cluster_port_findings,
    free_port_findings,
    shown_address,
)
from pdserve.doctor.settings import Settings, expiry_finding, key_findings, settings_findings
from pdserve.launch.folder import state_file

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def only(settings: Settings) -> Finding:
    (finding,) = settings_findings(settings, NOW)
    return finding


@pytest.mark.parametrize(
    ("days", "level", "seen"),
    [
        (-3, Level.FAILED, "x, expired 3 days ago"),
        (0, Level.FAILED, "x, expired 0 days ago"),
        (13, Level.WARNING, "x, 13 days left"),
        (15, Level.OK, "x, 15 days left"),
    ],
)
def test_certificates_that_end_are_found_in_time(days: int, level: Level, seen: str) -> None:
    finding = expiry_finding("identity", "x", NOW + timedelta(days=days), NOW)
    assert (finding.level, finding.seen) == (level, seen)


def test_files_that_cannot_be_read_are_found(tmp_path: Path) -> None:
    assert only(Settings(identity_dir=tmp_path)).level is Level.FAILED
    assert only(Settings(ssl_certfile=tmp_path / "a", ssl_keyfile=tmp_path / "b")).level is Level.FAILED
    assert only(Settings(model=str(tmp_path / "none"))).level is Level.FAILED
    assert only(Settings(secret_file=tmp_path / "none")).level is Level.FAILED


def test_a_key_that_no_process_has_is_found_with_the_nearest_one() -> None:
    (finding,) = key_findings(["num_page", "num_pages", "placement", "policy", "routers", "workers"], known_settings())
    assert (finding.level, finding.seen) == (Level.FAILED, "num_page: unknown key, did you mean num_pages?")


def test_a_secret_must_be_private(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0" * 64)
    secret.chmod(0o644)
    assert only(Settings(secret_file=secret)).level is Level.FAILED
    secret.chmod(0o440)
    assert only(Settings(secret_file=secret)).level is Level.OK


def test_settings_are_read_from_the_file_of_any_process(tmp_path: Path) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("model: m\nidentity_dir: /i\nhandoff_rdma_devices: [mlx5_0:1]\nnum_pages: 4\n")
    settings = read_model(Settings, file)
    assert (settings.model, settings.identity_dir) == ("m", Path("/i"))
    assert (settings.handoff_rdma_devices, settings.model_extra) == (("mlx5_0:1",), {"num_pages": 4})
    file.write_text("- no mapping\n")
    with pytest.raises(ConfigError, match="must hold keys and values"):
        read_model(Settings, file)


def test_a_process_listens_where_its_cluster_says_and_on_loopback_alone() -> None:
    expected = {"router": frozenset({"127.0.0.1:1"})}
    for addresses, level in (
        (frozenset({"127.0.0.1:1", "[::1]:2"}), Level.OK),
        (frozenset({"127.0.0.1:2"}), Level.FAILED),
        (frozenset({"127.0.0.1:1", "0.0.0.0:2"}), Level.WARNING),
    ):
        (finding,) = cluster_port_findings({"router": addresses}, expected)
        assert finding.level is level, finding


@pytest.mark.parametrize(
    ("configured", "bound", "level"),
    [
        ("localhost:1", "127.0.0.1:1", Level.OK),
        ("0.0.0.0:1", "[::]:1", Level.WARNING),
        ("[::]:1", "0.0.0.0:1", Level.WARNING),
        ("0.0.0.0:1", "127.0.0.1:1", Level.FAILED),
        ("localhost:1", "127.0.0.1:2", Level.FAILED),
    ],
)
def test_an_endpoint_is_compared_by_where_its_name_leads(configured: str, bound: str, level: Level) -> None:
    (finding,) = cluster_port_findings({"router": frozenset({bound})}, {"router": frozenset({configured})})
    assert finding.level is level, finding


def test_ports_of_the_process_that_runs_the_doctor_are_not_taken_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setitem(gathering.PORTS, port, "a test")
        look = f"from pdserve.doctor import gathering as g; g.PORTS[{port}] = ''; print(g.gather_taken())"
        seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
        assert str(port) not in seen
        assert port in gathering.gather_taken(), "its own, and not of what it runs under"


def test_no_cluster_is_fine_and_one_that_left_its_state_behind_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    levels = {finding.name: finding.level for finding in cluster_checks("c", OperatorFlags("c").client, None)}
    assert levels["cluster"] is Level.OK
    file = state_file("c")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    (finding,) = cluster_checks("c", OperatorFlags("c").client, None)
    assert (finding.name, finding.level) == ("cluster", Level.FAILED)
    assert "another version" in finding.seen


def test_listeners_of_a_process_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"127.0.0.1:{server.getsockname()[1]}" in gather_listeners({"me": os.getpid(), "gone": 2**22 - 1})["me"]


def test_an_address_of_ipv4_is_shown_as_one() -> None:
    assert shown_address("::ffff:127.0.0.1", 5) == "127.0.0.1:5"
    assert shown_address("::1", 5) == "[::1]:5"
    assert shown_address("fe80::1%eth0", 5) == "[fe80::1]:5"


def test_ports_that_are_taken_are_named_with_who_has_them() -> None:
    (finding,) = free_port_findings({50051: "nginx (7)"})
    assert (finding.name, finding.level, finding.seen) == ("port 50051", Level.WARNING, "taken by nginx (7)")
    assert [finding.level for finding in free_port_findings({})] == [Level.OK]
