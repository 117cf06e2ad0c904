"""From a checkpoint and a target to jobs: the conversion of every tensor."""

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from perilune.convert import int4 as int4_again
from perilune.convert import nvfp4 as search
from perilune.convert.job import Job, Out, Piece, copy, row_slices
from perilune.convert.target import INPUT_SCALE, Target
from perilune.core.errors import CheckpointError, ConfigError
from perilune.formats import fp8_block, fp8_scaled, int4_compact, scheme
from perilune.formats import int4 as int4_format
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.nvfp4 import MAX, SCALE_MAX
from perilune.formats.served import SERVED
from perilune.loading.survey import Survey, read_parts
from perilune.model import names
from perilune.ops.harness.workspace import Workspaces

SCALE_NAMES = ".weight_scale"
GRID = (scheme.INT4, scheme.INT4_COMPACT)  # formats with weights q * s
KEPT_FACTORS = 64  # cached weight_scale_2 values. Larger: more memory; smaller: some are computed more than once


@dataclass(frozen=True, slots=True)
class Inputs:
    """Measurements of the routed experts' inputs (calibrate.py).

    scales  ModelOpt's input_scale by ("model.layers.3.mlp.experts", "gate_up" or "down")
    often   [i] uint8, 1 to 15: weight of squared errors at each input, relative within its block of 16. Keys: gate and
            up of a layer "model.layers.3.mlp.experts", one expert's down "model.layers.3.mlp.experts.17"
    """

    scales: Mapping[tuple[str, str], float] = field(default_factory=dict)
    often: Mapping[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        whole = hashlib.sha256(repr(sorted(self.scales.items())).encode())
        for name, shares in sorted(self.often.items()):
            whole.update(name.encode() + shares.numpy().tobytes())
        return whole.hexdigest()


class Encoder:
    """Makes jobs. `scales`: the INT4 scales kept beside a bfloat16 source (`sidecar`), if there are some.

    devices  where the work is done; each thread uses one of them
    inputs   set it before the first job runs; layers that it has no scale for keep the source's, or get INPUT_SCALE
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        found: Survey,
        target: Target,
        devices: Sequence[torch.device],
        scales: Checkpoint | None = None,
    ) -> None:
        self._checkpoint, self._found, self._target = checkpoint, found, target
        self._devices, self._threads, self._own = devices, itertools.count(), threading.local()
        self._scales = scales
        self._workspaces = Workspaces()
        self.inputs = Inputs()
        self._factors: dict[tuple[str, ...], Tensor] = {}
        self._lock = threading.Lock()
        kinds = {form for name, form in found.formats.items() if names.EXPERT.fullmatch(name)}
        if len(kinds) > 1:
            raise ConfigError(f"{checkpoint.path}: experts in several formats ({', '.join(sorted(kinds))}) at once")
        self.experts = kinds.pop() if kinds else scheme.DENSE
        if target.to == "fp8-dense" and self.experts not in (scheme.INT4, scheme.DENSE):
            raise ConfigError(
                f"fp8-dense leaves the experts as they are and combines with INT4 or bfloat16 ones, not "
                f"{self.experts}: convert to int4 first"
            )

    def jobs(self) -> list[Job]:
        """All jobs in the order of the source's files. ConfigError if nothing would change."""
        jobs = [*self._linears(), *self._rest()]
        if not any(job.linear for job in jobs):
            raise ConfigError(f"{self._checkpoint.path} is {self._target.to} already: nothing to convert")
        return sorted(jobs, key=lambda job: job.at)

    def sidecar(self) -> list[Job]:
        """Jobs that copy the INT4 scales, which are needed to convert bfloat16 weights back to the same INT4."""
        if self._target.to != "bf16" or not self._target.sidecar or self.experts != scheme.INT4:
            return []
        scales = (name + SCALE_NAMES for name in self._found.formats if names.EXPERT.fullmatch(name))
        jobs = [copy(self._checkpoint, self._found.tensors[name], self._stored(name)) for name in scales]
        return sorted(jobs, key=lambda job: job.at)

    # ---- which job for which tensor ------------------------------------------------------------------------------

    def _linears(self) -> Iterator[Job]:
        make: dict[str, Callable[[str], Job]] = {
            scheme.DENSE: self._to_dense,
            scheme.INT4: self._to_int4,
            scheme.INT4_COMPACT: self._to_compact,
            scheme.NVFP4: self._to_nvfp4,
            scheme.NVFP4_PACKED: self._to_nvfp4,
            scheme.FP8_ROWS: self._to_fp8,
            scheme.FP8_SCALED: self._to_fp8,
        }
        for name, form in self._found.formats.items():
            wanted = self._target.experts if names.EXPERT.fullmatch(name) else self._target.others
            if wanted is None or wanted == form:
                for suffix, part in self._found.parts(name).items():
                    yield copy(self._checkpoint, self._found.tensors[name + suffix], self._stored(name) + suffix, part)
                if wanted in (scheme.NVFP4, scheme.NVFP4_PACKED):
                    yield self._input_number(name)
            else:
                yield make[wanted](name)

    def _rest(self) -> Iterator[Job]:
        """Norms, embedding, router and vision tensors, under the names they should have."""
        for name, info in self._found.tensors.items():
            if name.rpartition(".")[0] not in self._found.formats:
                yield copy(self._checkpoint, info, self._found.prefix + name)
        for name, info in self._checkpoint.tensors.items():
            if name.startswith(names.VISION) and not names.SKIPPED.fullmatch(name):
                yield copy(self._checkpoint, info)

    # ---- the encodings -------------------------------------------------------------------------------------------

    def _to_nvfp4(self, name: str) -> Job:
        form = self._found.formats[name]
        maximum = self._target.recipe == "max"
        if form in (scheme.NVFP4, scheme.NVFP4_PACKED):
            return self._nvfp4_layout(name)
        pair = self._pair(name)

        def piece(rows: slice) -> Piece:
            factor = self._factor(pair)
            if maximum:
                done = search.by_maximum(self._weights(name, rows), factor.to(self._device))
            else:
                exponent, often = math.frexp(factor.item())[1] - 1, self._often(name)
                if form in GRID:
                    with self._workspaces.use():
                        done = search.from_int4(*self._grid(name, rows), exponent, often)
                else:
                    done = search.from_weights(self._weights(name, rows), exponent, often)
            return Piece(done.values, (done.scale,), done.signal, done.error)

        return self._job(name, self._nvfp4_outs(name), piece, lambda: self._tail(name, self._factor(pair)))

    def _nvfp4_layout(self, name: str) -> Job:
        """Between ModelOpt's layout and compressed-tensors'; values and block scales are copied."""
        to_packed = self._target.layout == "compressed-tensors"
        old = ".weight" if to_packed else ".weight_packed"

        def piece(rows: slice) -> Piece:
            stored = self._parts(name, rows)
            return Piece(stored[old], (stored[SCALE_NAMES],))

        def tail() -> tuple[Tensor, ...]:
            number = ".weight_scale_2" if to_packed else ".weight_global_scale"
            factor = self._checkpoint.read(self._found.tensors[name + number].name).reshape(())
            return self._tail(name, factor if to_packed else factor.reciprocal())

        return self._job(name, self._nvfp4_outs(name), piece, tail)

    def _nvfp4_outs(self, name: str) -> tuple[Out, ...]:
        o, i = self._found.shapes[name]
        scale = Out(SCALE_NAMES, torch.float8_e4m3fn, (o, i // scheme.NVFP4_GROUP))
        if self._target.layout == "compressed-tensors":
            numbers = (Out(s, torch.float32, (1,)) for s in (".weight_global_scale", ".input_global_scale"))
            return Out(".weight_packed", torch.uint8, (o, i // 2)), scale, *numbers
        numbers = (Out(s, torch.float32, ()) for s in (".weight_scale_2", ".input_scale"))
        return Out(".weight", torch.uint8, (o, i // 2)), scale, *numbers

    def _input_number(self, name: str) -> Job:
        """The scale of activations of a matrix that is copied."""
        info, out = self._found.tensors[name + SCALE_NAMES], self._nvfp4_outs(name)[-1]
        made = replace(out, name=self._stored(name) + out.name)
        return Job((info.file.name, info.offset), 0, (made,), (lambda: Piece(self._tail(name, torch.ones(()))[1]),))

    def _tail(self, name: str, factor: Tensor) -> tuple[Tensor, ...]:
        inputs = self._input_scale(name)
        if self._target.layout == "compressed-tensors":
            # A matrix of zeros has block scales of 0, so its global scale does not matter.
            return (torch.where(factor == 0, 1.0, factor).reciprocal().reshape(1), inputs.reciprocal().reshape(1))
        return (factor, inputs)

    def _input_scale(self, name: str) -> Tensor:
        """ModelOpt's input_scale, [] float32: measured, else the source's, else INPUT_SCALE."""
        _, layer, kind = _expert(name)
        known = self.inputs.scales.get((layer, "down" if kind == "down" else "gate_up"))
        if known is not None:
            return torch.tensor(known)
        suffix = {scheme.NVFP4: ".input_scale", scheme.NVFP4_PACKED: ".input_global_scale"}
        if (form := self._found.formats[name]) not in suffix:
            return torch.tensor(INPUT_SCALE)
        stem = self._found.tensors[name + SCALE_NAMES].name.removesuffix(SCALE_NAMES)
        if (info := self._checkpoint.tensors.get(stem + suffix[form])) is None:
            return torch.tensor(INPUT_SCALE)
        scale = self._checkpoint.read(info.name).float()
        if scale.numel() != 1 or not scale.isfinite().all() or scale.item() <= 0:
            raise CheckpointError(f"{self._checkpoint.path}: tensor {info.name} must be one positive number")
        return scale.reshape(()) if form == scheme.NVFP4 else scale.reshape(()).reciprocal()

    def _often(self, name: str) -> Tensor | None:
        stem, layer, kind = _expert(name)
        known = self.inputs.often.get(stem[:-1] if kind == "down" else layer)
        if known is None:
            return None
        if known.shape != self._found.shapes[name][1:]:
            raise ConfigError(f"what was measured for {self._stored(name)} has {len(known)} inputs: measure again")
        return known.to(self._device)

    def _pair(self, name: str) -> tuple[str, ...]:
        """The matrices that share a scale with `name`: engines fuse gate and up, and keep one scale for both."""
        stem, _, kind = _expert(name)
        return (name,) if kind == "down" else names.mlp(stem)["gate_up"]

    def _factor(self, pair: tuple[str, ...]) -> Tensor:
        """weight_scale_2 of these matrices, [] float32 on the CPU. Two threads may compute it at once, with equal
        results."""
        with self._lock:
            known = self._factors.get(pair)
        if known is not None:
            return known
        if self._target.recipe == "max":
            factor = torch.stack([self._largest(name) for name in pair]).amax() / (MAX * SCALE_MAX)
        else:
            factor = torch.tensor(2.0 ** search.exponent_for(self._largest_scale(name) for name in pair))
        with self._lock:
            if len(self._factors) >= KEPT_FACTORS:
                self._factors.clear()
            self._factors[pair] = factor
        return factor

    def _largest(self, name: str) -> Tensor:
        rows, inputs = self._found.shapes[name]
        return torch.stack([self._weights(name, part).abs().amax().cpu() for part in row_slices(rows, inputs)]).amax()

    def _largest_scale(self, name: str) -> Tensor:
        form = self._found.formats[name]
        if form not in GRID:
            return self._largest(name) / int4_format.MAX_LEVEL
        suffix = SCALE_NAMES if form == scheme.INT4 else ".weight_scale_row"
        scale = self._checkpoint.read(self._found.tensors[name + suffix].name).to(torch.bfloat16)
        if not scale.isfinite().all():
            raise CheckpointError(f"{self._checkpoint.path}: tensor {self._stored(name)}{suffix} is not finite")
        return scale.amax()

    def _to_int4(self, name: str) -> Job:
        o, i = self._found.shapes[name]
        form = self._found.formats[name]
        kept = None
        if self._scales is not None and (kept := self._scales.tensors.get(self._stored(name) + SCALE_NAMES)) is None:
            raise CheckpointError(f"{self._scales.path}: tensor {self._stored(name)}{SCALE_NAMES} is missing")

        def piece(rows: slice) -> Piece:
            if form in GRID:
                packed, scale = self._grid(name, rows)
                w = self._weights(name, rows)
                lost = int4_format.dequantize(packed, scale, torch.float32) - w
                return Piece(packed, (scale,), search.energy(w), search.energy(lost))
            stored = self._parts(name, rows)
            w = stored[".weight"] if form == scheme.DENSE else SERVED[form].decode(stored, torch.float32)
            if kept is not None and self._scales is not None:
                scale = torch.empty(rows.stop - rows.start, *kept.shape[1:], dtype=kept.dtype)
                self._scales.read_into(kept, scale, rows.start * (kept.nbytes // kept.shape[0]))
                scale = scale.to(self._device)
                packed, same = int4_again.onto(w, scale)
                if not same:
                    text = "do not belong to the weights beside them: remove the directory to convert without"
                    raise CheckpointError(f"{self._scales.path}: the scales of {self._stored(name)} {text}")
                return Piece(packed, (scale,), search.energy(w), 0.0)
            try:
                packed, scale = int4_again.quantize(w)
            except ValueError as e:
                raise CheckpointError(f"{self._checkpoint.path}: {self._stored(name)}: {e}") from e
            lost = int4_format.dequantize(packed, scale, w.dtype).float() - w.float()
            return Piece(packed, (scale,), search.energy(w), search.energy(lost))

        dtype = torch.bfloat16 if kept is None else kept.dtype
        return self._job(name, self._int4_outs(o, i, dtype), piece, lambda: (torch.tensor([o, i]),))

    def _to_compact(self, name: str) -> Job:
        o, i = self._found.shapes[name]
        form = self._found.formats[name]
        packed_out, _, shape_out = self._int4_outs(o, i, torch.uint8)
        outs = (
            packed_out,
            Out(SCALE_NAMES, torch.uint8, (o, i // scheme.INT4_GROUP)),
            Out(".weight_scale_row", torch.bfloat16, (o,)),
            shape_out,
        )

        def piece(rows: slice) -> Piece:
            if form == scheme.INT4:
                stored = self._parts(name, rows)
                try:
                    *made, lost = int4_compact.compacted(stored[".weight_packed"], stored[SCALE_NAMES])
                except ValueError as e:
                    raise CheckpointError(f"{self._checkpoint.path}: {self._stored(name)}: {e}") from e
                return Piece(made[0], (made[1], made[2]), lost.signal, lost.error)
            w = self._weights(name, rows)
            (_, packed), (_, scale), (_, row), _ = int4_compact.encode(self._stored(name), w)
            difference = int4_compact.dequantize(packed, scale, row, torch.float32) - w
            return Piece(packed, (scale, row), search.energy(w), search.energy(difference))

        return self._job(name, outs, piece, lambda: (torch.tensor([o, i]),))

    def _int4_outs(self, o: int, i: int, scale: torch.dtype) -> tuple[Out, Out, Out]:
        int4_format.parts((o, i))  # refuses widths that do not divide
        return (
            Out(".weight_packed", torch.int32, (o, i // 8)),
            Out(SCALE_NAMES, scale, (o, i // scheme.INT4_GROUP)),
            Out(".weight_shape", torch.int64, (2,)),
        )

    def _to_dense(self, name: str) -> Job:
        def piece(rows: slice) -> Piece:
            w = self._weights(name, rows)
            rounded = w.to(torch.bfloat16)
            return Piece(rounded, (), search.energy(w), search.energy(rounded.float() - w))

        return self._job(name, (Out(".weight", torch.bfloat16, self._found.shapes[name]),), piece)

    def _to_fp8(self, name: str) -> Job:
        o, i = self._found.shapes[name]
        by_row = self._target.scales == "row"

        def piece(rows: slice) -> Piece:
            w = self._weights(name, rows)
            (_, q), (_, scale) = fp8_scaled.encode(self._stored(name), w, rows=by_row)
            stored = {".weight": q, SCALE_NAMES: scale}
            lost = SERVED[self._target.others].decode(stored, torch.float32) - w
            return Piece(q, (scale,), search.energy(w), search.energy(lost))

        shape = (o, 1) if by_row else (fp8_block.blocks(o), fp8_block.blocks(i))
        outs = (Out(".weight", torch.float8_e4m3fn, (o, i)), Out(SCALE_NAMES, torch.float32, shape))
        return self._job(name, outs, piece)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _job(
        self,
        name: str,
        outs: tuple[Out, ...],
        piece: Callable[[slice], Piece],
        tail: Callable[[], tuple[Tensor, ...]] = tuple,
    ) -> Job:
        infos = [self._found.tensors[name + suffix] for suffix in self._found.parts(name)]
        first = min(infos, key=lambda info: (info.file.name, info.offset))
        return Job(
            at=(first.file.name, first.offset),
            reads=sum(info.nbytes for info in infos),
            outs=tuple(Out(self._stored(name) + out.name, out.dtype, out.shape) for out in outs),
            pieces=tuple(partial(_on_host, piece, rows) for rows in row_slices(*self._found.shapes[name])),
            tail=tail,
            linear=self._stored(name),
        )

    @property
    def _device(self) -> torch.device:
        if not hasattr(self._own, "device"):
            self._own.device = self._devices[next(self._threads) % len(self._devices)]
        device: torch.device = self._own.device
        return device

    def _stored(self, name: str) -> str:
        return self._found.prefix + name

    def _parts(self, name: str, rows: slice) -> dict[str, Tensor]:
        return read_parts(self._checkpoint, self._found, name, rows=rows, device=self._device)

    def _weights(self, name: str, rows: slice) -> Tensor:
        """The weights in float32; CheckpointError if they are not finite."""
        w = SERVED[self._found.formats[name]].decode(self._parts(name, rows), torch.float32)
        if not w.isfinite().all():
            raise CheckpointError(f"{self._checkpoint.path}: tensor {self._stored(name)}.weight is not finite")
        return w

    def _grid(self, name: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Levels as INT4 packs them, and scales in bfloat16: exact if stored as bfloat16."""
        stored = self._parts(name, rows)
        scale = stored[SCALE_NAMES]
        if self._found.formats[name] == scheme.INT4_COMPACT:
            scale = int4_compact.expand(scale, stored[".weight_scale_row"])
        if (scale < 0).any():
            where = f"{self._checkpoint.path}: tensor {self._stored(name)}{SCALE_NAMES}"
            raise CheckpointError(f"{where} holds scales that are negative")
        return stored[".weight_packed"], scale.to(torch.bfloat16)


def _on_host(make: Callable[[slice], Piece], rows: slice) -> Piece:
    """Makes a piece and copies it to host memory, on the calling thread, so that the writing thread does not wait."""
    piece = make(rows)
    return replace(piece, rows=piece.rows.cpu(), waiting=tuple(part.cpu() for part in piece.waiting))


def _expert(name: str) -> tuple[str, ...]:
    return names.EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]  # expert names only


def kept_scales(path: Path) -> Path:
    """The folder of the INT4 scales kept beside a bfloat16 conversion."""
    return path / "int4_scales"
