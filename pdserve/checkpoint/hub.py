"""Models of the Hugging Face hub, named ORGANIZATION/MODEL, or ORGANIZATION/MODEL@REVISION to pin one.

`huggingface_hub` downloads them. Without a folder of their own it keeps them in its cache, which other programs share.
Only files that cannot run code are fetched: safetensors, JSON, tokenizer.model, the chat template.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from pdserve.base.errors import ConfigError
from pdserve.base.values import value
from pdserve.checkpoint.home import Home, sync, writing

HUB_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "tokenizer.model",
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "chat_template.json"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
)
_NAME = re.compile(r"((?!\.)[\w.-]+/(?!\.)[\w.-]+)(?:@((?!\.)[\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+", re.ASCII)


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


def fetch_snapshot(model: HubModel, home: Home) -> Path:
    """Return the folder with a model's files, fetched unless they are there.

    In a folder for models, what has once been fetched for a revision stays, also after a branch has moved: all who use
    the folder have the same weights. In the hub's cache a branch is looked up each time, unless there is no network or
    HF_HUB_OFFLINE=1. ConfigError if the model cannot be fetched.
    """
    if home.folder is None:
        from huggingface_hub import constants  # noqa: PLC0415 - as the others here

        with writing(Path(constants.HF_HUB_CACHE), "HF_HOME"), _refusals(model):
            return _download(model.repository, model.revision)
    revision = (model.revision or "main").replace("/", "--")
    target = home.folder / f"models--{model.repository.replace('/', '--')}" / "snapshots" / revision
    if not target.is_dir():
        with home.turn(target), _refusals(model):
            if not target.is_dir():
                _fetch_to(target, model)
    return target


def _fetch_to(target: Path, model: HubModel) -> None:
    from huggingface_hub import HfApi  # noqa: PLC0415 - takes long to import

    commit = HfApi().model_info(model.repository, revision=model.revision).sha or "main"
    partial = target.with_name(f".{target.name}.{commit}.partial")
    for other in target.parent.glob(f".{target.name}.*.partial"):
        if other != partial:  # the branch has moved
            shutil.rmtree(other)
    for torn in partial.glob(".cache/**/*.incomplete"):  # of a process that was killed: the library cannot continue it
        torn.unlink()
    _download(model.repository, commit, partial)
    _check(model.repository, commit, partial)
    shutil.rmtree(partial / ".cache")
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.rename(target)
    sync(target.parent)


def _download(repository: str, revision: str | None, folder: Path | None = None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    if not sys.stderr.isatty():
        disable_progress_bars()
    path = Path(snapshot_download(repository, revision=revision, allow_patterns=list(HUB_FILES), local_dir=folder))
    if not (path / "config.json").is_file() or not any(path.glob("model*.safetensors")):
        raise ConfigError(
            f"model: {repository} has no config.json with model.safetensors: pickled weights are never loaded; give "
            "the path of a GGUF file, or of a directory in Hugging Face's format"
        )
    return path


def _check(repository: str, commit: str, folder: Path) -> None:
    """Compare all files with the digests that the hub publishes; ConfigError names one that differs or is missing."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    found = HfApi().verify_repo_checksums(repository, revision=commit, local_dir=folder)
    for wrong in found.mismatches:
        (folder / wrong["path"]).unlink()
    for wrong in found.mismatches:
        raise ConfigError(
            f"model: {repository}: {wrong['path']} has {wrong['algorithm']} {wrong['actual']}, and {wrong['expected']} "
            "is expected. Nothing of it is kept; try again"
        )
    for path in found.missing_paths:
        if any(fnmatch(path, pattern) for pattern in HUB_FILES):
            raise ConfigError(f"model: {repository}: {path} did not come; try again")


@contextmanager
def _refusals(model: HubModel) -> Iterator[None]:
    """Say what helps against errors of the hub."""
    from httpx2 import HTTPError, TransportError  # noqa: PLC0415 - as the others here
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = model.repository
    try:
        yield
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
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, TransportError) as error:
        raise ConfigError(
            f"model: {name} is no path that exists and not in the cache, and the hub cannot be reached. Fetch it where "
            f"there is a network (`pdserve models fetch {name}`) and copy the folder that this prints, or "
            "set HF_ENDPOINT to a mirror"
        ) from error
    except (HTTPError, ValueError) as error:
        raise ConfigError(f"model: {name}: {error}") from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            raise  # of a file, not of the network
        raise ConfigError(f"model: {name}: {error}") from error


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
