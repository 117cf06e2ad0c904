"""safetensors, which writes corpora, states and progress of training. Only making drafters needs it (extra `draft`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError

try:
    from safetensors import SafetensorError
    from safetensors import safe_open as _safe_open
    from safetensors.torch import load_file as _load_file
    from safetensors.torch import save_file as _save_file
except ImportError as e:
    raise ConfigError("making drafters needs safetensors: pip install safetensors") from e


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """ConfigError if the file cannot be written, for example on a full disk."""
    try:
        _save_file(dict(tensors), path, metadata)
    except SafetensorError as e:
        text = f"cannot write {path}: {e}"
        raise ConfigError(f"{text}; what is finished is kept: repeat the command to go on") from e


def load_file(path: Path) -> dict[str, Tensor]:
    """CheckpointError if the file is damaged."""
    try:
        return _load_file(path)
    except SafetensorError as e:
        raise _damaged(path, e) from e


def safe_open(path: Path, framework: str) -> Any:
    """The open file, a context manager. CheckpointError if the file is damaged."""
    try:
        return _safe_open(path, framework)
    except SafetensorError as e:
        raise _damaged(path, e) from e


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({error})", remedy="remove it and repeat the command that made it")
