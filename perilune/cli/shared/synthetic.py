"""A temporary model directory of random weights, for `--synthetic SHAPE`. No torch."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perilune.bench import shapes
from perilune.core.errors import ConfigError
from perilune.formats import synthetic
from perilune.formats.hub import BUNDLED, resolve_model
from perilune.model.draft_config import config_for
from perilune.model.eagle3_config import DRAFTER

DRAFT_LAYERS = 4  # fewest layers of a target of which a draft model can read three


@contextlib.contextmanager
def directory(name: str, layers: int | None) -> Iterator[Path]:
    """A directory with the shape's configuration, a vocabulary and a draft model's, until the context ends.

    layers  how many of the shape's layers, at least 1; None: all
    """
    if name not in shapes.SHAPES:
        raise ConfigError(f"unknown shape {name!r}; known: {', '.join(shapes.SHAPES)}")
    whole = shapes.SHAPES[name]["num_hidden_layers"]
    mark = synthetic.Synthetic(name, whole if layers is None else layers, whole)
    config = shapes.raw(name, mark.layers)
    target = shapes.shape(name, mark.layers)
    with tempfile.TemporaryDirectory(prefix="perilune-synthetic-") as temporary:
        path = Path(temporary) / f"synthetic-{name}"
        path.mkdir()
        synthetic.write(path, mark, config, resolve_model(BUNDLED))
        if mark.layers >= DRAFT_LAYERS:
            synthetic.write_draft(path / DRAFTER, mark, config_for(target))
        yield path
