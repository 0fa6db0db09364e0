"""The images' files say what the tree and the command line have: what is sent to a build, and what compose runs."""

from pathlib import Path

import pytest
import typer.main
import yaml

from pdserve.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "deploy" / "images"
SERVICES = yaml.safe_load((IMAGES / "compose.yaml").read_text(encoding="utf-8"))["services"]
COMMANDS = [name for name, service in SERVICES.items() if "entrypoint" not in service]


def test_a_build_gets_every_folder_that_the_package_links_to() -> None:
    lines = (IMAGES / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    links = [path.readlink() for path in (ROOT / "pdserve").iterdir() if path.is_symlink()]
    assert {link.parts[1] for link in links} <= {line[1:] for line in lines if line.startswith("!")}


def test_nothing_that_runs_in_compose_may_more_than_it_needs() -> None:
    for name, service in SERVICES.items():
        assert (service["read_only"], service["cap_drop"], service["user"]) == (True, ["ALL"], "65532:65532"), name
        assert service["network_mode"] == "host", f"{name}: published ports need certificates and keys"


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_compose_are_known_and_listen_on_loopback_alone(name: str) -> None:
    command, *words = SERVICES[name]["command"]
    known = getattr(typer.main.get_command(app), "commands")[command].params  # noqa: B009 - click's, not typer's
    given = {word for word in words if word.startswith("--")}
    assert given <= {flag for parameter in known for flag in parameter.opts}
    assert not [flag for flag in given if flag.endswith("-host") or flag == "--host"]


def test_every_process_of_compose_is_probed_where_it_shows_its_health() -> None:
    ports = {}
    for name, service in SERVICES.items():
        if "healthcheck" in service:
            words = service["command"]
            ports[name] = words[words.index("--health-port") + 1]
            assert service["environment"] == {"HEALTH_PORT": ports[name]}
    assert len(set(ports.values())) == len(ports) == 3
