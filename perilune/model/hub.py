"""What MODEL on the command line stands for: a directory, the bundled model, or a Hugging Face repository."""

import errno
import re
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import tqdm

from perilune.core.errors import ConfigError

BUNDLED = "kimi-nano"
# Data only. Repositories of this family also carry Python files; they are never fetched, let alone run.
PATTERNS = ("*.safetensors", "*.json", "tiktoken.model")
MEANING = f"MODEL is a directory, a Hugging Face repository id such as moonshotai/Kimi-K2.5, or {BUNDLED}"

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})


def resolve_model(
    name: str, *, revision: str | None = None, progress: bool = True, endpoint: str | None = None
) -> Path:
    """The local directory of a model; a repository is downloaded into the hub's cache, unless it is there already.

    revision  branch, tag or commit of a repository; default: its main branch
    progress  show the download's bars on stderr
    endpoint  the hub's address, if not the public one

    Files that arrived whole are kept when a download is interrupted, and only the others are fetched again; a
    connection lost during a call is resumed where it broke. Raises ConfigError with the remedy.
    """
    if not name:
        raise ConfigError(f"no model is named: {MEANING}")
    directory = Path(name).expanduser()
    if name == BUNDLED and not directory.is_dir():
        directory = Path(__file__).parents[1] / "bundled" / BUNDLED
        if not directory.is_dir():
            raise ConfigError(f"the bundled model {BUNDLED} is not in this installation ({directory}): reinstall it")
    if directory.is_dir():
        if revision is not None:
            raise ConfigError(f"revision={revision!r} belongs to a hub repository, but {name} is a directory")
        return directory
    if not _REPOSITORY.fullmatch(name):
        kind = "is a file" if directory.is_file() else "does not exist"
        raise ConfigError(f"model {name!r} {kind}: {MEANING}")
    return _download(name, revision, progress, endpoint)


def _download(name: str, revision: str | None, progress: bool, endpoint: str | None) -> Path:
    at = f"{name}@{revision}" if revision else name
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                endpoint=endpoint,
                allow_patterns=list(PATTERNS),
                tqdm_class=None if progress else _Silent,
            )
        )
    except hub_errors.GatedRepoError as e:
        raise ConfigError(f"{at} is gated: accept its terms on the hub, then run `hf auth login`") from e
    except hub_errors.RepositoryNotFoundError as e:
        raise ConfigError(
            f"no directory {name!r} here, and no such repository on the hub, or a private one: check the name, or run "
            "`hf auth login`"
        ) from e
    except hub_errors.RevisionNotFoundError as e:
        raise ConfigError(f"{name} has no revision {revision!r} on the hub: leave it out for the main branch") from e
    except hub_errors.LocalEntryNotFoundError as e:
        raise ConfigError(
            f"the hub cannot be reached and {at} is not complete in the cache: check the network, or give a directory"
        ) from e
    except Exception as e:
        # The library's transport, and with it the class of a lost connection, differs between the versions we accept.
        status = getattr(getattr(e, "response", None), "status_code", None)
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"no space left in {huggingface_hub.constants.HF_HUB_CACHE}: free some, or set HF_HOME elsewhere"
        elif status in (401, 403):
            reason = f"access denied (HTTP {status}): run `hf auth login` with an account that may read it"
        else:
            reason = f"{' '.join(str(e).split()) or type(e).__name__}; repeat the command to go on where it stopped"
        raise ConfigError(f"download of {at} failed: {reason}") from e
