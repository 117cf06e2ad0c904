"""A draft's checkpoint with the names that other engines read, too: `midlayer.*`, fc, norms; lm_head, d2t and t2d if
the draft has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from perilune.formats.writer import write


def export(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes the draft without an embedding, and without a head unless it has its own: it shares its target's. The
    directory must hold no checkpoint."""
    write(directory, tensors.items(), config=config)
