"""JSON objects in files of a model directory: CheckpointError if one cannot be read, atomic replacement."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.core.errors import CheckpointError
from perilune.core.files import read_regular

MAX_HEADER = 100_000_000  # bytes of the JSON header of a safetensors file; the format's own bound


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. CheckpointError if the file is absent, unreadable, not JSON or not an object."""
    try:
        data = json.loads(read_regular(path))
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{path} does not exist: {path.parent} is incomplete, or another directory is meant"
        ) from e
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def spelled(data: Mapping[str, Any]) -> str:
    """The JSON text that `write_object` writes."""
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def write_object(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, spelled(data))


def write_text(path: Path, text: str) -> None:
    """Replaces `path` in one step, so that no reader ever sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        Path(temporary).chmod(0o644)  # mkstemp makes files only their owner may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_output(path: Path, text: str) -> None:
    """Writes a file that the user named: replaces it in one step, or writes to it if it is a device or a pipe, such as
    /dev/stdout, where os.replace would put a file in its place."""
    if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    else:
        write_text(path, text)
