"""Model directories without weights: a shape, a vocabulary, and a file (the mark) that asks for random weights.

Whatever loads such a directory (engine, ranks, bench) gets random weights, made on the device. No torch.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.files import exists
from perilune.core.jsonfile import read_object, write_object

MARK = "synthetic.json"
CONTROL_SLOTS = 256  # ids after the base tokens, text/tokenizer.py
VOCABULARY, SPECIALS = "tiktoken.model", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Synthetic:
    """The content of a mark: name of the shape, number of its layers that are kept, seed of the random weights."""

    shape: str
    layers: int
    of_layers: int
    seed: int = 0

    def __str__(self) -> str:
        return f"random weights of {self.shape}, {self.layers} of {self.of_layers} layers"


def read(path: Path) -> Synthetic | None:
    """The mark of a model directory; None for one with weights. CheckpointError if it cannot be read."""
    if not exists(path / MARK):
        return None
    data = read_object(path / MARK)
    shape, numbers = data.get("shape"), [data.get(key) for key in ("layers", "of_layers", "seed")]
    layers, of_layers, seed = (n if type(n) is int and 0 <= n < 1 << 63 else -1 for n in numbers)
    if not isinstance(shape, str) or min(layers, of_layers, seed) < 0:
        raise CheckpointError(f"{path / MARK} must name a shape, layers, of_layers and a seed")
    return Synthetic(shape, layers, of_layers, seed)


def write(path: Path, mark: Synthetic, config: Mapping[str, Any], vocabulary: Path) -> None:
    """Writes a directory that `load` makes random weights for.

    config      config.json; its vocab_size is at least that of the vocabulary
    vocabulary  directory of a tokenizer. The result has its base tokens, then " w<id>" for every missing id, then its
                control tokens, as in Kimi's own vocabularies
    """
    lines = (vocabulary / VOCABULARY).read_bytes().splitlines()
    own, base = len(lines), config["vocab_size"] - CONTROL_SLOTS
    if base < own:
        raise ConfigError(f"{mark.shape} has {config['vocab_size']} tokens, the vocabulary {own + CONTROL_SLOTS}")
    fill = (b"%s %d" % (base64.b64encode(b" w%d" % id), id) for id in range(own, base))
    (path / VOCABULARY).write_bytes(b"\n".join([*lines, *fill]) + b"\n")
    specials = json.loads((vocabulary / SPECIALS).read_text())
    added = specials["added_tokens_decoder"]
    specials["added_tokens_decoder"] = {str(int(id) - own + base): token for id, token in added.items()}
    write_object(path / SPECIALS, specials)
    write_object(path / "config.json", config)
    write_object(path / MARK, asdict(mark))


def write_draft(path: Path, mark: Synthetic, config: Mapping[str, Any]) -> None:
    """As `write`, for the draft model of a directory."""
    path.mkdir()
    write_object(path / "config.json", config)
    write_object(path / MARK, asdict(mark))
