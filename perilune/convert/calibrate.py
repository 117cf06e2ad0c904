"""Measures the inputs of experts in a short run over text, for NVFP4: scales of activations, and weights of errors.

scales  the largest absolute input of a layer's experts, by projection, gives ModelOpt's input_scale. All experts of a
        layer share it, also those that got no token.
often   the mean square of each input channel: a weight's squared error changes the output's in proportion to it, so the
        search for block scales weights squared errors by it. Gate and up of all experts of a layer share one vector;
        down of each expert has its own. Stored as 1 to 15, relative to the largest in a block of 16; all equal for an
        expert that got no token.

The numbers are kept beside the result, so that a conversion that is stopped and continued uses the same ones.
"""

import io
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perilune.convert.encode import Inputs
from perilune.convert.stream import CALIBRATION
from perilune.convert.texts import Texts
from perilune.convert.walk import Walk, run
from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.jsonfile import read_object, write_object
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.nvfp4 import MAX, SCALE_MAX
from perilune.formats.scheme import NVFP4_GROUP
from perilune.model import names
from perilune.ops.quantize.nvfp4_from_int4 import OFTEN

PROJECTIONS = ("gate_up", "down")
PRIOR = 64  # pseudo-tokens with equal inputs. Larger: more equal weights for experts that got few tokens

Maxima = Mapping[str, Mapping[str, float]]  # by "model.layers.3.mlp.experts" and projection


@dataclass(frozen=True, slots=True)
class Measured:
    """maxima: the largest absolute inputs; often: as `Inputs` has it."""

    maxima: Maxima
    often: Mapping[str, Tensor]

    def inputs(self) -> Inputs:
        """The Inputs. Layers with inputs of 0 only get no scale."""
        scales = {
            (layer, projection): largest / (MAX * SCALE_MAX)
            for layer, each in self.maxima.items()
            for projection, largest in each.items()
            if largest > 0
        }
        return Inputs(scales, self.often)


def calibrated(
    source: Path,
    directory: Path,
    texts: Texts,
    *,
    key: str,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> Inputs:
    """The inputs kept in `directory` if they were measured by the same call; else measures them and keeps them there.

    key  identifies the source
    """
    about = _about(texts, key)
    text, arrays = (directory / name for name in CALIBRATION)
    if text.is_file() and arrays.is_file():
        kept, measured = _read(text, arrays)
        if kept == about:
            say(f"inputs as measured before: {text}")
            return measured.inputs()
    say(f"measuring inputs over {texts.tokens:,} tokens ({texts.kind})")
    measured = measure(source, texts, device)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        packed = io.BytesIO()
        named: dict[str, Any] = {name: each.numpy() for name, each in measured.often.items()}
        np.savez(packed, **named)
        temporary = arrays.with_name(f".{arrays.name}.part")
        temporary.write_bytes(packed.getvalue())
        os.replace(temporary, arrays)
        write_object(text, {"about": about, "maxima": measured.maxima})
    except OSError as e:
        raise CheckpointError(f"cannot write {e.filename or directory}: {e.strerror}") from e
    return measured.inputs()


def require_same(directory: Path, texts: Texts, key: str) -> None:
    """ConfigError if the inputs kept in `directory` were measured over other texts."""
    if read_object(directory / CALIBRATION[0]).get("about") != _about(texts, key):
        raise ConfigError(
            f"{directory} was calibrated over other text: give the same --text and --calibrate-tokens, or another "
            "directory"
        )


def _about(texts: Texts, key: str) -> dict[str, Any]:
    return {"source": key, "text": texts.kind, "tokens": texts.tokens, "sha256": texts.digest()}


def measure(source: Path, texts: Texts, device: torch.device) -> Measured:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    watch = _Watch()
    with Checkpoint.open(source) as checkpoint, torch.inference_mode():
        run(Walk(checkpoint, texts.sequences, dtype=dtype, device=device), watch.see)
    return watch.measured()


@dataclass(slots=True)
class _Sums:
    """Of all experts of one layer: sums of squared inputs of gate and up; `largest` absolute inputs by projection."""

    tokens: int = 0
    squares: Tensor | None = None
    largest: dict[str, Tensor] = field(default_factory=dict)


class _Watch:
    def __init__(self) -> None:
        self._layers: dict[int, _Sums] = {}
        self._often: dict[str, Tensor] = {}

    def see(self, layer: int, expert: int, x: Tensor, hidden: Tensor) -> None:
        sums = self._layers.setdefault(layer, _Sums())
        for projection, values in zip(PROJECTIONS, (x, hidden)):
            largest = values.abs().amax().float()
            sums.largest[projection] = torch.maximum(largest, sums.largest.get(projection, largest))
        squares = _squares(x)
        sums.tokens += len(x)
        sums.squares = squares if sums.squares is None else sums.squares + squares
        self._often[f"{names.experts(layer)}.{expert}"] = shares(_squares(hidden), len(hidden))

    def measured(self) -> Measured:
        maxima = {names.experts(i): {p: x.item() for p, x in sums.largest.items()} for i, sums in self._layers.items()}
        whole = {
            names.experts(i): shares(s.squares, s.tokens) for i, s in self._layers.items() if s.squares is not None
        }
        return Measured(maxima, self._often | whole)


def shares(squares: Tensor, tokens: int) -> Tensor:
    """squares [i], finite sums over `tokens` tokens -> [i] uint8 on the CPU, 1 to 15; the largest of a block is 15."""
    mean = squares.mean() / tokens
    blocks = ((squares + PRIOR * mean) / (tokens + PRIOR)).view(-1, NVFP4_GROUP)
    largest = blocks.amax(-1, keepdim=True)
    scaled = OFTEN * blocks / torch.where(largest == 0, 1.0, largest)
    return scaled.round().clamp(1, OFTEN).to(torch.uint8).flatten().cpu()


def _squares(x: Tensor) -> Tensor:
    return x.float().square().sum(0, dtype=torch.float64)


def _read(text: Path, arrays: Path) -> tuple[Any, Measured]:
    data = read_object(text)
    try:
        maxima = {layer: {p: float(each[p]) for p in PROJECTIONS} for layer, each in data["maxima"].items()}
        with np.load(arrays, allow_pickle=False) as stored:
            often = {name: torch.from_numpy(stored[name]) for name in stored.files}
    except (KeyError, TypeError, ValueError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as e:
        raise _damaged(text) from e
    if not all(math.isfinite(x) and x >= 0 for each in maxima.values() for x in each.values()):
        raise _damaged(text)
    if not all(x.dtype == torch.uint8 and x.ndim == 1 and 1 <= x.min() <= x.max() <= OFTEN for x in often.values()):
        raise _damaged(arrays)
    return data.get("about"), Measured(maxima, often)


def _damaged(file: Path) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: remove it to measure again")
