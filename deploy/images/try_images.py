"""Try what the Dockerfile does, step by step, on a machine without a container runtime.

Each stage is a folder, fresh unless an earlier trial left it. COPY copies into it. RUN, and the entry point at the end,
run chrooted in it, with this machine's /usr, /etc and a Python 3.11 mounted read-only where the base image has its own.
What this does not try is the base image itself, and steps that install Debian packages: those are skipped, and named.

Root is needed (mounts, chroot), and this machine should be a Debian of the base image's release.

    sudo python3 deploy/images/try_images.py FOLDER router worker-cpu --python ~/.pyenv/versions/3.11.7
"""

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

IMAGES = Path(__file__).resolve().parent
TREE = IMAGES.parent.parent
HOST = ("bin", "sbin", "lib", "lib64", "usr", "etc")  # of this machine, in place of the base image's
LENT = re.compile(r"PIP_|SSL_|\w+_proxy$")  # settings of this machine that steps of the build see
UNTRIED = re.compile(r"apt-get ")
CHANGES_FILES = {"RUN", "COPY"}
SHOWN_ONLY = {"LABEL", "STOPSIGNAL"}
DROP_PRIVILEGES = "--clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage as it stands after some of its steps."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine lends to stages: a Python 3.11, and folders under their own names."""

    python: Path
    binds: tuple[Path, ...]

    def chrooted(self, stage: Stage, command: str, *, mounts: str = "") -> list[str]:
        """Return the command that runs a shell's line in the stage, as its user and with its environment."""
        root = shlex.quote(str(stage.root))
        lines = ["set -e", f"mount --bind {root} {root}", f"cd {root}"]
        for name in HOST:
            if (host := Path("/", name)).is_symlink():
                lines.append(f"ln -sfn {host.readlink()} {name}")
            else:
                lines += _read_only(host, name)
        for bind in (self.python, *self.binds):
            lines += [f"mkdir -p .{bind}", *_read_only(bind, str(bind).lstrip("/"))]
        lines += ["mkdir -p dev proc sys tmp", "mount --rbind /dev dev", "mount --rbind /proc proc"]
        lines += ["mount -t sysfs -o ro sysfs sys", mounts]
        uid, _, gid = stage.user.partition(":")
        drop = "" if uid == "0" else f"setpriv --reuid={uid} --regid={gid} {DROP_PRIVILEGES}"
        inside = f"cd {stage.workdir} && {command}"
        environment = " ".join(shlex.quote(f"{name}={value}") for name, value in stage.env.items())
        lines.append(f"exec env -i {environment} chroot . {drop} /bin/sh -c {shlex.quote(inside)}")
        return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]


def _read_only(source: Path, name: str) -> list[str]:
    return [f"mkdir -p {name}", f"mount --bind {shlex.quote(str(source))} {name}", f"mount -o remount,bind,ro {name}"]


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions with their arguments, in order."""
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name.upper(), " ".join(rest.split()))
        for name, rest in (line.split(maxsplit=1) for line in joined.splitlines())
    ]


class Trial:
    def __init__(self, folder: Path, machine: Machine, arguments: dict[str, str]) -> None:
        self.stages: dict[str, Stage] = {}
        self._folder, self._machine, self._given = folder, machine, arguments
        self._global: dict[str, str] = {}

    def build(self, dockerfile: str, targets: list[str]) -> None:
        """Run the instructions of the stages that the targets need."""
        parts = re.split(r"(?m)^(?=FROM )", dockerfile)
        self._global = dict(argument.split("=", 1) for name, argument in instructions(parts[0]) if name == "ARG")
        named = {instructions(part)[0][1].split()[-1]: instructions(part) for part in parts[1:]}
        for name in [name for name in named if name in _needed(named, targets)]:
            self._stage(name, named[name])

    def _stage(self, name: str, steps: list[tuple[str, str]]) -> None:
        parent = steps[0][1].split()[0]
        root = self._folder / name
        is_there = root.exists()
        if parent in self.stages:
            stage = replace(self.stages[parent], root=root)
            if not is_there:
                subprocess.run(["cp", "-a", self.stages[parent].root, root], check=True)
        else:
            root.mkdir(parents=True, exist_ok=True)
            path = f"{self._machine.python}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            stage = Stage(root, {"PATH": path, **{k: v for k, v in os.environ.items() if LENT.match(k)}})
        arguments = dict(self._global)
        for instruction, text in steps[1:]:
            began_s = time.monotonic()
            if not (is_there and instruction in CHANGES_FILES):
                stage = self._step(stage, instruction, text, arguments)
            logger.info("%s: %s %s [%.1f s]", name, instruction, text[:90], time.monotonic() - began_s)
        self.stages[name] = stage

    def _step(self, stage: Stage, instruction: str, text: str, arguments: dict[str, str]) -> Stage:
        match instruction:
            case "ARG":
                name, _, default = text.partition("=")
                arguments[name] = self._given.get(name, default)
            case "ENV":
                return replace(stage, env={**stage.env, **_settings(text, stage.env)})
            case "WORKDIR":
                (stage.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
                return replace(stage, workdir=text)
            case "USER":
                return replace(stage, user=text)
            case "ENTRYPOINT" | "CMD":
                return replace(stage, **{instruction.lower(): tuple(json.loads(text))})
            case "COPY":
                self._copy(stage, text.split())
            case "RUN" if UNTRIED.search(text):
                logger.warning("NOT TRIED, it installs Debian packages: %s", text)
            case "RUN":
                line = re.sub(r"--mount=\S+ ", "", text)
                with_arguments = replace(stage, env={**stage.env, **arguments})
                subprocess.run(self._machine.chrooted(with_arguments, line), check=True)
            case _ if instruction not in SHOWN_ONLY:
                raise SystemExit(f"{instruction} is not known here")
        return stage

    def _copy(self, stage: Stage, words: list[str]) -> None:
        target = stage.root / os.path.join(stage.workdir, words[-1]).lstrip("/")
        if words[0].startswith("--from="):
            source = self.stages[words[0].removeprefix("--from=")].root / words[1].lstrip("/")
            shutil.copytree(source, target, symlinks=True)
            return
        for path in context():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TREE / path, target / path, follow_symlinks=False)

    def contained(self, name: str, command: list[str], volume: Path, env: dict[str, str]) -> list[str]:
        """Return what runs a command as an image's user; its root is read-only but for a volume at $HOME."""
        stage = self.stages[name]
        mounts = f"mount -o remount,bind,ro .\nmount --bind {shlex.quote(str(volume))} {stage.env['HOME'].lstrip('/')}"
        line = f"! touch /opt/pdserve/written 2>&- && exec {shlex.join(command)}"
        return self._machine.chrooted(replace(stage, env={**stage.env, **env}), line, mounts=mounts)


def _needed(named: dict[str, list[tuple[str, str]]], targets: list[str]) -> set[str]:
    """Return the stages that the targets are made of."""
    needed: set[str] = set()
    waiting = list(targets)
    while waiting:
        if (name := waiting.pop()) in named and name not in needed:
            needed.add(name)
            waiting += [named[name][0][1].split()[0]]
            waiting += [match[1] for _, text in named[name] if (match := re.match(r"--from=(\S+)", text))]
    return needed


def _settings(text: str, known: dict[str, str]) -> dict[str, str]:
    pairs = dict(word.split("=", 1) for word in shlex.split(text))
    return {
        name: re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), value) for name, value in pairs.items()
    }


def context() -> list[Path]:
    """Return the tracked files that the list beside the Dockerfile admits; symbolic links stay links."""
    lines = (IMAGES / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    admitted = [line[1:] for line in lines if line.startswith("!")]
    listed = subprocess.run(["git", "ls-files", *admitted], cwd=TREE, check=True, capture_output=True, text=True)
    return [Path(name) for name in listed.stdout.splitlines()]


def volume_of(folder: Path, user: str) -> Path:
    """Make a folder that belongs to an image's user."""
    folder.mkdir(exist_ok=True)
    os.chown(folder, *map(int, user.split(":")))
    return folder


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path, help="where stages are built")
    flags.add_argument("--python", type=Path, required=True, help="prefix of a Python 3.11")
    flags.add_argument("--bind", type=Path, action="append", default=[], help="a folder that pip reads here")
    flags.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    return flags


def built(given: argparse.Namespace, targets: list[str]) -> Trial:
    """Build the targets, show their sizes, and run each one's entry point."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = dict(argument.split("=", 1) for argument in given.build_arg)
    trial = Trial(given.folder, Machine(given.python, tuple(given.bind)), arguments)
    trial.build((IMAGES / "Dockerfile").read_text(encoding="utf-8"), targets)
    for target in targets:
        stage = trial.stages[target]
        used = subprocess.run(["du", "-sm", stage.root], check=True, capture_output=True, text=True)
        logger.info("%s: %s MB beside the base image", target, used.stdout.split()[0])
        volume = volume_of(given.folder / f"{target}-volume", stage.user)
        subprocess.run(trial.contained(target, [*stage.entrypoint, "--version"], volume, {}), check=True)
    return trial


def main() -> None:
    flags = parser()
    flags.add_argument("targets", nargs="+")
    given = flags.parse_args()
    built(given, given.targets)


if __name__ == "__main__":
    main()
