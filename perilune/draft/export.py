"""A draft's checkpoint, as other engines also read it: `midlayer.*`, fc, norms, and if there are lm_head, d2t, t2d."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from perilune.formats.writer import write


def export(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes the draft without an embedding, and without a head unless it has its own: it shares its target's. The
    directory must hold no checkpoint."""
    write(directory, tensors.items(), config=config)
