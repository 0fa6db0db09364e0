"""UCX listens on addresses of the configured host, and nowhere else."""

import socket
from pathlib import Path

import numpy as np
import psutil
import pytest

from pdserve.base.clock import new_incarnation
from pdserve.base.errors import ConfigError
from pdserve.base.ids import Peer, WorkerId
from pdserve.kvtransfer.backends import ucx
from pdserve.kvtransfer.backends.nixl import NixlBackend
from pdserve.kvtransfer.backends.ucx import Network, listeners
from pdserve.kvtransfer.mover import Mover
from pdserve.kvtransfer.region import Region


def addresses_of_machine() -> list[str]:
    """Return one address for each interface that is up and has one."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    owned = {
        name: [a.address for a in found if a.family is socket.AF_INET] for name, found in psutil.net_if_addrs().items()
    }
    return [found[0] for name, found in owned.items() if name in up and found]


def listens_on(network: Network) -> set[str]:
    """Return the addresses on which a mover listens."""
    before = listeners()
    region = Region.of(np.zeros((4, 4096), np.uint8))
    mover = Mover(NixlBackend(Peer(WorkerId("w"), new_incarnation()), region, network), lambda _: None)
    try:
        return {str(address) for address, _ in listeners() - before}
    finally:
        mover.close()


@pytest.mark.parametrize("host", addresses_of_machine())
def test_a_mover_listens_on_the_address_of_its_host_alone(host: str) -> None:
    assert listens_on(Network(host)) == {host}


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("127.0.0.3", "127.0.0.1"), ("::1", "::1")])
def test_any_loopback_address_and_names_of_it_stay_on_the_loopback(host: str, address: str) -> None:
    assert listens_on(Network(host)) == {address}


def test_the_host_of_all_addresses_listens_on_each_interface() -> None:
    assert listens_on(Network("0.0.0.0")) >= set(addresses_of_machine())


@pytest.mark.parametrize("name", ["UCX_NET_DEVICES", "UCX_TLS"])
def test_an_inherited_setting_of_ucx_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "mlx5_9:1")
    with pytest.raises(ConfigError, match=f"environment: {name}=mlx5_9:1 is not obeyed: .* say "):
        listens_on(Network())


def test_an_inherited_setting_that_says_the_same_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Network().settings()
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert listens_on(Network()) == {"127.0.0.1"}
    assert Network().settings() == settings


@pytest.mark.parametrize(
    ("network", "complaint"),
    [
        (Network("203.0.113.77"), "handoff_host: 203.0.113.77 is no address of this machine"),
        (Network("nowhere.invalid"), "handoff_host: nowhere.invalid: "),
        (Network(rdma_devices=("mlx5_99:1",)), "handoff_rdma_devices: mlx5_99:1 names no device:port"),
        (Network(rdma_devices=("mlx5_0:1",), tcp_only=True), "handoff_rdma_devices: none can be used where"),
    ],
)
def test_a_network_that_cannot_be_had_is_refused_by_name(network: Network, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        network.settings()


def test_rdma_devices_are_taken_beside_the_interface_of_the_host_if_the_machine_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    monkeypatch.setattr(ucx, "RDMA_DEVICES", tmp_path)
    assert Network(rdma_devices=("mlx5_0:1",)).settings()["UCX_NET_DEVICES"] == "lo,mlx5_0:1"
    for missing in ("mlx5_0:2", "mlx5_0", "mlx5_0:1,mlx5_0:1", ":1"):
        with pytest.raises(ConfigError, match=f"handoff_rdma_devices: {missing} names no device:port"):
            Network(rdma_devices=(missing,)).settings()


def test_a_port_that_ucx_cannot_have_is_the_operators_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{port}-{port}")
        with pytest.raises(ConfigError, match="mover: NIXL cannot start UCX over Network"):
            listens_on(Network())


def test_what_listens_elsewhere_in_spite_of_the_settings_is_found_and_refused() -> None:
    def set_up(stray: socket.socket) -> None:
        with Network().confine(gpu=False):
            stray.bind(("0.0.0.0", 0))
            stray.listen()

    with (
        socket.socket() as stray,
        pytest.raises(ConfigError, match=r"127.0.0.1 is asked for, and UCX listens on 0.0.0.0 port \d+"),
    ):
        set_up(stray)
