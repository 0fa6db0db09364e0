"""Try the compose file on a machine without a container runtime: its services as processes, from images tried as well.

The Dockerfile's targets are tried first (`try_images.py`, whose flags this takes). Then every service runs chrooted in
its image with a read-only root, in a network of its own whose loopback is all there is. What is shown: both workers
and the router become healthy by their health checks, the question is answered, and SIGTERM ends each with status 0.

    sudo .venv/bin/python deploy/images/try_compose.py FOLDER --python ~/.pyenv/versions/3.11.7
"""

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from try_images import IMAGES, Trial, built, parser, volume_of

HEALTHY_WITHIN_S = 120
ENDED_WITHIN_S = 35

logger = logging.getLogger(__name__)


class Services:
    """The services of the compose file, as processes over one volume."""

    def __init__(self, trial: Trial, volume: Path) -> None:
        text = (IMAGES / "compose.yaml").read_text(encoding="utf-8")
        given = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: os.environ.get(match[1], match[2]), text)
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(given)["services"]
        self._trial, self._volume = trial, volume

    def command(self, name: str, test: list[str] | None = None) -> list[str]:
        """Return what runs a service, or a health check in it."""
        service = self.services[name]
        image = service["image"].removeprefix("pdserve-")
        stage = self._trial.stages[image]
        line = test or [*service.get("entrypoint", stage.entrypoint), *service["command"]]
        return self._trial.contained(image, line, self._volume, service.get("environment", {}))

    def is_healthy(self, name: str, network: list[str]) -> bool:
        test = self.services[name]["healthcheck"]["test"][1:]
        return subprocess.run([*network, *self.command(name, test)], check=False, capture_output=True).returncode == 0


@contextmanager
def own_network() -> Iterator[list[str]]:
    """Make a network with a loopback only; yield what runs a command within."""
    line = "ip link set lo up && echo up && exec sleep infinity"
    with subprocess.Popen(["unshare", "--net", "sh", "-c", line], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        finally:
            holder.kill()


def try_services(services: Services, network: list[str]) -> None:
    """Run the services with health checks, ask the question, and stop them."""
    names = [name for name, service in services.services.items() if "healthcheck" in service]
    running = {name: subprocess.Popen([*network, *services.command(name)]) for name in names}
    try:
        deadline_s = time.monotonic() + HEALTHY_WITHIN_S
        for name in names:
            while not services.is_healthy(name, network):
                if time.monotonic() > deadline_s or running[name].poll() is not None:
                    raise SystemExit(f"{name} is not healthy")
            logger.info("%s is healthy", name)
        subprocess.run([*network, *services.command("ask")], check=True)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        ended = {name: process.wait(ENDED_WITHIN_S) for name, process in running.items()}
    logger.info("ended with: %s", ended)
    if any(ended.values()):
        raise SystemExit("not all services have ended with status 0")


def main() -> None:
    given = parser().parse_args()
    trial = built(given, ["router", "worker-cpu"])
    volume = volume_of(given.folder / "state", trial.stages["router"].user)
    services = Services(trial, volume)
    subprocess.run(services.command("prepare"), check=True)
    with own_network() as network:
        try_services(services, network)


if __name__ == "__main__":
    main()
