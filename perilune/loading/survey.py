"""Checks a checkpoint's tensors against its configuration (names, shapes, types), and reads rows of linear layers."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from perilune.core.errors import CheckpointError, ConfigError, shown
from perilune.formats import scheme
from perilune.formats.checkpoint import Checkpoint, few
from perilune.formats.dense import FLOATS
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.served import SERVED, format_of
from perilune.formats.stored import Part
from perilune.model import names
from perilune.model.config import KimiConfig


@dataclass(frozen=True, slots=True)
class Stretch:
    """A region of a stored tensor. `part`: the tensor's role in a linear layer; None if it belongs to none."""

    info: TensorInfo
    region: tuple[slice, ...]
    part: Part | None = None

    @classmethod
    def whole(cls, info: TensorInfo, part: Part | None = None) -> Self:
        return cls(info, tuple(slice(0, n) for n in info.shape), part)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(own.stop - own.start for own in self.region)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.info.dtype.itemsize

    def rows(self, first: int, count: int) -> "Stretch":
        """Its rows first .. first + count - 1, as far as they exist."""
        own, *rest = self.region
        start = own.start + first
        return Stretch(self.info, (slice(start, min(start + count, own.stop)), *rest), self.part)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.info.dtype)

    def read(self, checkpoint: Checkpoint, out: torch.Tensor) -> None:
        """Fills `out` (CPU, contiguous, of the stored type). CheckpointError if the values cannot be right."""
        checkpoint.read_block(self.info, out, self.region)
        if self.part is not None:
            require_sound(checkpoint, self.info, self.part, out)


@dataclass(frozen=True, slots=True)
class Survey:
    """The tensors of a checkpoint that agree with its configuration. Names are without prefix."""

    prefix: str  # before every name of model/names.py
    tensors: Mapping[str, TensorInfo]  # those to read, by their usual names (`_usual`)
    formats: Mapping[str, str]  # of each linear layer, by its name without ".weight"
    shapes: Mapping[str, tuple[int, ...]]  # (o, i) of each linear layer
    text_bytes: int
    vision_tensors: int
    vision_bytes: int

    def parts(self, linear: str) -> dict[str, Part]:
        """The tensors to read of a linear layer, by the suffixes of their names."""
        stored = SERVED[self.formats[linear]].parts(self.shapes[linear])
        return {suffix: part for suffix, part in stored.items() if not part.unread}

    def stretches(self, linear: str, rows: slice = slice(None), columns: slice = slice(None)) -> dict[str, Stretch]:
        """The stored regions of rows and columns of a linear layer, by suffix. ConfigError if a group would be cut."""
        shape = self.shapes[linear]
        cut = tuple(slice(*own.indices(size)[:2]) for own, size in zip((rows, columns), shape))
        found = {}
        for suffix, part in self.parts(linear).items():
            info = self.tensors[linear + suffix]
            try:
                found[suffix] = Stretch(info, part.region(info.shape, shape, cut), part)
            except ValueError as e:
                raise ConfigError(
                    f"tensor {shown(info.name)}: a rank's part would cut one of its {e}: run fewer ranks"
                ) from e
        return found


def survey(checkpoint: Checkpoint, config: KimiConfig) -> Survey:
    """Checks all names, shapes and types; reads no data. CheckpointError names the first few that are wrong."""
    found, faults = compare(checkpoint.tensors, config)
    if faults:
        raise CheckpointError(f"{checkpoint.path}: {faults[0]}")
    return found


def compare(
    stored: Mapping[str, TensorInfo], config: KimiConfig, unread: Iterable[str] = ()
) -> tuple[Survey, list[str]]:
    """The survey, and one line for each kind of fault, worst first.

    unread  names of tensors with unknown headers, not in `stored`; their layers have no missing or surplus tensors
    """
    tensors, faults = _usual(stored)
    unknown = {name.rpartition(".")[0] for name in unread}
    nested = any(name.startswith(names.NESTED) for name in (*stored, *unread))
    prefix = names.NESTED if nested else ""
    looks: dict[str, str | None] = {}
    formats: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    wanted: dict[str, Part] = {}
    unsuited: list[str] = []
    for name, shape, entry, _ in names.tensors(config):
        if entry.linear:
            linear = name.removesuffix(".weight")
            looks[linear], shapes[linear] = format_of(tensors, prefix + linear), shape
        else:
            wanted[prefix + name] = Part(shape, FLOATS)
    choice = _FormatChoice(tensors, prefix, looks)
    for linear, shape in shapes.items():
        try:
            formats[linear], parts = choice.of(linear, shape)
        except CheckpointError as e:
            unsuited.append(f"tensor {prefix}{linear}.weight: {e}")
            continue
        wanted |= {prefix + linear + suffix: part for suffix, part in parts.items()}

    faults += _first(unsuited)
    lacking = [name for name, part in wanted.items() if name not in tensors and not part.unread]
    if missing := [name for name in lacking if name.rpartition(".")[0] not in unknown]:
        faults.append(f"lacks {few(missing, 'tensor')}")
    vision = [t for name, t in tensors.items() if name.startswith(names.VISION)]
    surplus = [
        info.name
        for name, info in tensors.items()
        if name not in wanted
        and not name.startswith(names.VISION)
        and not names.SKIPPED.fullmatch(name)
        and name.rpartition(".")[0] not in unknown
    ]
    if surplus:
        faults.append(f"holds {few(surplus, 'tensor')} that are no part of the model in config.json")
    read = {name: part for name, part in wanted.items() if not part.unread and name in tensors}
    faults += _misfits(tensors, read)
    found = Survey(
        prefix=prefix,
        tensors={name.removeprefix(prefix): tensors[name] for name in read},
        formats=formats,
        shapes=shapes,
        text_bytes=sum(tensors[name].nbytes for name in read),
        vision_tensors=len(vision),
        vision_bytes=sum(t.nbytes for t in vision),
    )
    return found, faults


class _FormatChoice:
    """Chooses the format that a linear layer is checked against.

    `format_of` looks at one or two tensors of a layer. If these are missing or damaged, it may name a format in which
    all other tensors of the layer look wrong. So if the named format has faults, the format with the fewest is taken.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo], prefix: str, looks: Mapping[str, str | None]) -> None:
        self._tensors, self._prefix, self._looks = tensors, prefix, looks
        self._known: dict[tuple[str, tuple[int, ...]], Mapping[str, Part]] = {}  # K2: 69,000 layers, about 12 shapes
        self._usual: dict[str, str] | None = None  # counted when first needed; a sound checkpoint never needs it

    def of(self, linear: str, shape: tuple[int, ...]) -> tuple[str, Mapping[str, Part]]:
        """The format and its parts. CheckpointError if the format that `format_of` found does not allow the shape."""
        own = self._looks[linear] or scheme.DENSE
        parts = self._parts(own, shape)
        if self._faults(linear, parts, companions=own == scheme.DENSE) == 0:
            return own, parts
        usual = self._usual_format(linear)
        if not any(self._prefix + linear + suffix in self._tensors for suffix in _SUFFIXES):
            return usual, self._parts(usual, shape)
        best, least = own, self._faults(linear, parts, companions=True)
        for form in SERVED:
            try:
                faults = self._faults(linear, self._parts(form, shape), companions=True)
            except CheckpointError:
                continue
            # On a tie: prefer the format that the same projection has in other experts, unless that is dense.
            if faults < least or (faults == least and form == usual != scheme.DENSE):
                best, least = form, faults
        return best, self._parts(best, shape)

    def _parts(self, form: str, shape: tuple[int, ...]) -> Mapping[str, Part]:
        if (parts := self._known.get((form, shape))) is None:
            parts = self._known[form, shape] = SERVED[form].parts(shape)
        return parts

    def _faults(self, linear: str, parts: Mapping[str, Part], *, companions: bool = False) -> int:
        """Parts that are missing or do not fit; with `companions`, also parts of other formats that are there."""
        count = 0
        for suffix, part in parts.items():
            info = self._tensors.get(self._prefix + linear + suffix)
            if not part.unread and (info is None or not part.fits(info.shape) or info.dtype not in part.dtypes):
                count += 1
        if companions:
            count += sum(s not in parts and self._prefix + linear + s in self._tensors for s in _SUFFIXES)
        return count

    def _usual_format(self, linear: str) -> str:
        """The most frequent format of this linear layer in other layers of the model and other experts; else dense."""
        if self._usual is None:
            counts: dict[str, Counter[str]] = {}
            for name, form in self._looks.items():
                if form is not None:
                    counts.setdefault(_NUMBER.sub("*", name), Counter())[form] += 1
            self._usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
        return self._usual.get(_NUMBER.sub("*", linear), scheme.DENSE)


_NUMBER = re.compile(r"\d+")
_SUFFIXES = sorted({suffix for form in SERVED.values() for suffix in form.parts((128, 128))})


def _misfits(tensors: Mapping[str, TensorInfo], read: Mapping[str, Part]) -> list[str]:
    """One line for wrong shapes and one for wrong types: the first tensor, and how many more."""
    shapes, dtypes = [], []
    for name, part in read.items():
        info = tensors[name]
        if not part.fits(info.shape):
            stored = shown(list(info.shape))
            shapes.append(f"tensor {shown(info.name)} has shape {stored}, config.json asks for {list(part.shape)}")
        if info.dtype not in part.dtypes:
            allowed = " or ".join(spell(d) for d in part.dtypes)
            dtypes.append(f"tensor {shown(info.name)} is {spell(info.dtype)}, not {allowed}")
    return _first(shapes) + _first(dtypes)


def _first(lines: list[str]) -> list[str]:
    more = f" (and {len(lines) - 1:,} more likewise)" if len(lines) > 1 else ""
    return [lines[0] + more] if lines else []


def _usual(stored: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors with `language_model.layers.` spelt `language_model.model.layers.`; a fault if one is there twice."""
    tensors: dict[str, TensorInfo] = {}
    twice = []
    for name, info in stored.items():
        usual = name
        if name.startswith(names.LEGACY_LAYERS):
            usual = names.NESTED_LAYERS + name.removeprefix(names.LEGACY_LAYERS)
        if usual in tensors:
            twice.append(f"holds {shown(tensors[usual].name)} and {shown(name)}, two names of the same tensor")
        tensors[usual] = info
    return tensors, twice[:1]


def read_linear(
    checkpoint: Checkpoint,
    found: Survey,
    name: str,
    dtype: torch.dtype,
    *,
    rows: slice = slice(None),
    columns: slice = slice(None),
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda nbytes: None,
) -> torch.Tensor:
    """Rows and columns of the linear layer `name` (without prefix and ".weight") in `dtype`, dequantised if need be.

    rows, columns  start and stop are multiples of the rows or columns that share a scale, or the matrix's ends
    advance        called with the number of bytes read, except for parts that belong to all rows

    CheckpointError if scales or other stored values cannot be right; ConfigError if a group of weights would be cut.
    """
    stored = read_parts(checkpoint, found, name, rows=rows, columns=columns, device=device, advance=advance)
    return SERVED[found.formats[name]].decode(stored, dtype)


def read_parts(
    checkpoint: Checkpoint,
    found: Survey,
    name: str,
    *,
    rows: slice = slice(None),
    columns: slice = slice(None),
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, torch.Tensor]:
    """The input of `read_linear`'s decoder: rows and columns of the stored parts, checked, by suffix of their names."""
    stored: dict[str, torch.Tensor] = {}
    for suffix, stretch in found.stretches(name, rows, columns).items():
        piece = stretch.empty()
        stretch.read(checkpoint, piece)
        if stretch.part is not None and stretch.part.covers:
            advance(piece.nbytes)
        stored[suffix] = piece.to(device)
    return stored


def require_sound(checkpoint: Checkpoint, info: TensorInfo, part: Part, values: torch.Tensor) -> None:
    """CheckpointError if values read from a part of a linear layer cannot be right."""
    if part.fault is not None and (fault := part.fault(values)):
        raise CheckpointError(f"{checkpoint.path}: tensor {shown(info.name)} {fault}")


def spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
