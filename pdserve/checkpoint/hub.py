"""Models of the Hugging Face hub, as ORGANIZATION/MODEL, or ORGANIZATION/MODEL@REVISION to pin one.

`huggingface_hub` fetches them and keeps them in its own cache, which other programs share. Only files that cannot run
code are fetched: safetensors, JSON, the chat template.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.values import value

FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "model.safetensors", "model-*.safetensors"),
    "model.safetensors.index.json",
)
_NAME = re.compile(r"((?!\.)[\w.-]+/(?!\.)[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+", re.ASCII)


@value
class HubModel:
    repository: str
    revision: str | None = None  # branch, tag or commit; None: the repository's default branch


def parse(name: str) -> HubModel | None:
    """Return what a name means on the hub; None for one that is no name of the hub, or means a file."""
    found = _NAME.fullmatch(name)
    return None if found is None or name.lower().endswith(".gguf") else HubModel(found[1], found[2])


def repository_of(path: Path) -> str | None:
    """Return the repository whose files a folder of the cache holds; None for any other folder."""
    found = _SNAPSHOT.fullmatch("/".join(path.absolute().parts[-3:]))
    return None if found is None else f"{found[1]}/{found[2]}"


def fetch_snapshot(model: HubModel) -> Path:
    """Return the folder with a model's files, fetched unless they are in the cache.

    Without a network, or with HF_HUB_OFFLINE=1, only the cache counts. ConfigError where the model cannot be had.
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
        path = Path(snapshot_download(name, revision=model.revision, allow_patterns=list(FILES)))
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


def cached() -> Iterator[tuple[HubModel, int]]:
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
