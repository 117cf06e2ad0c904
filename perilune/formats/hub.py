"""What MODEL on the command line means: a directory, the bundled model, or a Hugging Face repository."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import errors as hub_errors

# The documentation calls these functions public; the package lists no exports.
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, tqdm  # type: ignore[attr-defined]

from perilune.core.errors import ConfigError, quoted, shown
from perilune.core.jsonfile import MAX_HEADER

BUNDLED = "kimi-nano"
# Data only: the Python files of these repositories are neither fetched nor run.
TEXTS = ("*.json", "tiktoken.model", "*.jinja")
PATTERNS = ("*.safetensors", *TEXTS)
MEANING = f"MODEL is a directory, a Hugging Face repository id such as moonshotai/Kimi-K2.5, or {BUNDLED}"

_FIRST_BYTES = 1 << 20  # holds the whole header of most shards
_TIMEOUT = 30  # seconds
_ATTEMPTS = 4
# HTTP libraries of different huggingface_hub versions; each has its own class of error for a lost connection.
_TRANSPORTS = ("requests", "httpx", "httpx2")

T = TypeVar("T")

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]  # tqdm has no types


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    progress: bool = True,
    endpoint: str | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """The local directory of a model; a repository is downloaded into the hub's cache, unless it is there already.

    revision  branch, tag or commit of a repository; default: its main branch
    progress  show the download's bars on stderr
    endpoint  the hub's address, if not the public one
    check     called with the directory before weights are downloaded; an exception from it ends the download

    Files that arrived whole are kept when a download is interrupted, and only the others are fetched again; a
    connection lost during a call is resumed where it broke. Raises ConfigError with the remedy.
    """
    if not name:
        raise ConfigError(f"no model is named: {MEANING}")
    directory = _local(name)
    if name == BUNDLED and not os.path.isdir(directory):
        directory = Path(__file__).parents[1] / "bundled" / BUNDLED
        if not directory.is_dir():
            raise ConfigError(f"the bundled model {BUNDLED} is not in this installation ({directory}): reinstall it")
    if os.path.isdir(directory):
        if revision is not None:
            raise ConfigError(f"revision={quoted(revision)} belongs to a hub repository, but {name} is a directory")
        if check is not None:
            check(directory)
        return directory
    if not _REPOSITORY.fullmatch(name):
        kind = "is a file" if os.path.isfile(directory) else "does not exist"
        raise ConfigError(f"model {quoted(name)} {kind}: {MEANING}")
    if check is not None:
        check(_download(name, revision, False, endpoint, patterns=TEXTS))
    return _download(name, revision, progress, endpoint)


@contextlib.contextmanager
def headers(name: str, *, revision: str | None = None, endpoint: str | None = None) -> Iterator[Path]:
    """A temporary copy of the repository without its weights: each shard has its header, fetched by an HTTP range, and
    a hole of the data's size, which takes no disk space. ConfigError as `resolve_model`.
    """
    texts = _download(name, revision, False, endpoint, patterns=TEXTS)
    with tempfile.TemporaryDirectory(prefix="perilune-headers-") as temporary:
        path = Path(temporary)
        for file in texts.iterdir():
            if file.is_file():
                shutil.copyfile(file, path / file.name)
        with _explained(name, revision):
            _fetch_headers(name, revision, endpoint, path)
        yield path


def _fetch_headers(name: str, revision: str | None, endpoint: str | None, to: Path) -> None:
    info = huggingface_hub.HfApi(endpoint=endpoint).model_info(name, revision=revision, files_metadata=True)

    def fetch(file: str, size: int) -> None:
        url = huggingface_hub.hf_hub_url(name, file, revision=info.sha, endpoint=endpoint)
        start = _range(url, 0, min(size, _FIRST_BYTES))
        length = 8 + int.from_bytes(start[:8], "little")
        # A longer header means damage, which SafetensorsFile reports.
        if len(start) < length <= min(size, 8 + MAX_HEADER):
            start += _range(url, len(start), length)
        with (to / file).open("wb") as out:
            out.write(start[:length])
            out.truncate(size)

    with ThreadPoolExecutor(8, thread_name_prefix="headers") as pool:
        running = [
            pool.submit(fetch, file.rfilename, file.size or 0)
            for file in info.siblings or ()
            if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename
        ]
    for future in running:
        future.result()


def _range(url: str, first: int, end: int) -> bytes:
    """Bytes first to end - 1 of a file of the hub."""
    if end <= first:
        return b""
    wanted = {**build_hf_headers(), "range": f"bytes={first}-{end - 1}"}
    response = _repeated(lambda: get_session().get(url, headers=wanted, timeout=_TIMEOUT))
    hf_raise_for_status(response)
    return bytes(response.content[: end - first])


def _repeated(request: Callable[[], T]) -> T:
    """The result of `request`, retried if its connection is lost (_ATTEMPTS calls at most)."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return request()
        except Exception as e:
            if type(e).__module__.partition(".")[0] not in _TRANSPORTS:
                raise
    return request()


def is_repository(name: str) -> bool:
    """Whether MODEL is a hub repository's id: no such directory exists here, and the name has the form owner/name."""
    return not os.path.isdir(_local(name)) and name != BUNDLED and _REPOSITORY.fullmatch(name) is not None


def _local(name: str) -> Path:
    """MODEL as a path. os.path's functions, unlike Path's, accept any text; an invalid path is no directory."""
    return Path(os.path.expanduser(name))


def _download(
    name: str, revision: str | None, progress: bool, endpoint: str | None, *, patterns: Sequence[str] = PATTERNS
) -> Path:
    with _explained(name, revision):
        # The library repeats a GET, but not the HEAD before each file.
        directory = _repeated(
            lambda: huggingface_hub.snapshot_download(
                name,
                revision=revision,
                endpoint=endpoint,
                allow_patterns=list(patterns),
                tqdm_class=None if progress else _Silent,
            )
        )
    return Path(directory)


@contextlib.contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub's library raises into a ConfigError with the remedy."""
    at = f"{name}@{revision}" if revision else name
    try:
        yield
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
        status = getattr(getattr(e, "response", None), "status_code", None)
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"no space left in {huggingface_hub.constants.HF_HUB_CACHE}: free some, or set HF_HOME elsewhere"
        elif status in (401, 403):
            reason = f"access denied (HTTP {status}): run `hf auth login` with an account that may read it"
        else:
            words = shown(" ".join(str(e).split()), 400) or type(e).__name__
            reason = f"{words}; repeat the command to go on where it stopped"
        raise ConfigError(f"download of {at} failed: {reason}") from e
