"""Models of the Hugging Face hub: from a repository id to a directory in the hub's cache.

huggingface-hub does the work and reads its own variables: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only the
files that the engine reads are downloaded. huggingface-hub is imported where it is needed, because most models are
directories.
"""

import glob
import json
import re
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.orbax import FOLDER
from checkpoints.reader import INDEX, SINGLE

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # config, tokenizer, templates, index of the weights
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find_model(model: Path | str, *, revision: str | None = None, download_dir: Path | str | None = None) -> Path:
    """The directory of a model: `model` itself, or the download of a repository such as Qwen/Qwen2.5-0.5B-Instruct.

    A directory of this name comes first. Anything that is not like an id is returned as it is.

    Args:
        revision: branch, tag or commit of the repository. Default: main.
        download_dir: the hub's cache. Default: that of huggingface-hub.

    Raises:
        CheckpointError: the hub has no such repository or revision, or it cannot be reached or refuses and the cache
            does not have the model.
    """
    if Path(model).exists() or not is_repository(model):
        return Path(model)
    found = _download(str(model), [*SMALL_FILES], revision, download_dir)
    # The hash of the commit, so that all files are of one revision even if somebody pushes in between.
    commit = found.name if re.fullmatch(r"[0-9a-f]{40}", found.name) else revision
    return _download(str(model), _weights(found), commit, download_dir)


def is_repository(model: Path | str) -> bool:
    """Whether a name has the form of a repository id: an owner, a slash and a name."""
    return _REPOSITORY.fullmatch(str(model)) is not None


def find_config(model: str) -> Path:
    """The config.json of a repository; errors as in find_model."""
    return _download(model, ["config.json"], None, None) / "config.json"


def _weights(directory: Path) -> list[str]:
    """Patterns of the files with weights, by the reader's rule."""
    try:
        files = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({glob.escape(str(file)) for file in files})
    except FileNotFoundError:
        return [SINGLE, f"{FOLDER}/*"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [INDEX]  # it is damaged, which the reader says better


def _download(repository: str, patterns: list[str], revision: str | None, cache: Path | str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    at = f"{repository} at revision {revision}" if revision else repository
    folders = None if f"{FOLDER}/*" in patterns else ["*/*"]
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, cache_dir=cache, allow_patterns=patterns, ignore_patterns=folders
            )
        )
    except errors.GatedRepoError:
        raise CheckpointError(
            f"the hub refuses {repository}: it is gated. Accept its terms on its page, and set HF_TOKEN to a token of "
            "that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"the hub's repository {repository} has no revision {revision!r}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise CheckpointError(
            f"there is no directory {repository} here, and the hub has no such repository, or it is private: check the "
            "name, or set HF_TOKEN"
        ) from None
    # httpx's HTTPError, whichever httpx it is. A LocalEntryNotFoundError has what the hub answered as its cause.
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        cause = error.__cause__ or error
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        elif isinstance(cause, errors.HfHubHTTPError):
            why = f"{constants.ENDPOINT} answers {cause.response.status_code}"
        else:
            why = f"{constants.ENDPOINT} cannot be reached ({type(cause).__name__})"
        raise CheckpointError(
            f"there is no directory {repository} here, and {at} is not in the cache {cache or constants.HF_HUB_CACHE}, "
            f"or not whole: {why}. Download it where there is a network, or give a directory"
        ) from None
