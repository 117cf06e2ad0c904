"""The weights of a model, allocated, and the jobs that fill them from a checkpoint.

Routed experts, nearly all of the model, stay in the checkpoint's format; so do other linear layers in INT4. All other
linear layers are dequantised to the load's dtype here, once: they are 1.1 % of the parameters of Kimi K2, and so ops
need to handle only one format of them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from perilune.core.errors import CheckpointError
from perilune.dist.slicing import WHOLE, Slicing
from perilune.formats import int4_compact, scheme
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.fp8_block import BLOCK as FP8_BLOCK
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.served import SERVED
from perilune.formats.stored import Part
from perilune.loading import jobs
from perilune.loading.apart import Apart
from perilune.loading.cuts import own_cuts
from perilune.loading.rounding import Rounding
from perilune.loading.survey import Stretch, Survey, read_linear
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.weights import (
    Attention,
    DenseExperts,
    Experts,
    Fp8Experts,
    Int4CompactExperts,
    Int4Experts,
    Layer,
    Matrix,
    Mlp,
    Moe,
    NvFp4Experts,
    Weights,
)

# By format: the experts' record (fields of gate and up, then those of down), and the suffixes of each matrix's parts.
EXPERTS: Mapping[str, tuple[Callable[..., Experts], tuple[str, ...]]] = {
    scheme.DENSE: (DenseExperts, (".weight",)),
    scheme.INT4: (Int4Experts, (".weight_packed", ".weight_scale")),
    scheme.INT4_COMPACT: (Int4CompactExperts, (".weight_packed", ".weight_scale", ".weight_scale_row")),
    scheme.FP8_BLOCK: (Fp8Experts, (".weight", ".weight_scale_inv")),
    scheme.NVFP4: (NvFp4Experts, (".weight", ".weight_scale", ".weight_scale_2")),
    scheme.NVFP4_PACKED: (NvFp4Experts, (".weight_packed", ".weight_scale", ".weight_global_scale")),
}


def row_step(inputs: int) -> int:
    """How many rows of `inputs` columns to dequantise at once: STAGE_BYTES of float32, in whole FP8 blocks."""
    return max(jobs.STAGE_BYTES // (4 * inputs) // FP8_BLOCK, 1) * FP8_BLOCK


class WeightsPlan:
    """Allocates a rank's weights and collects the `jobs` that fill them. CheckpointError for a format that is not
    served, RuntimeError where memory is short."""

    def __init__(
        self,
        config: KimiConfig,
        checkpoint: Checkpoint,
        found: Survey,
        dtype: torch.dtype,
        device: torch.device,
        slicing: Slicing = WHOLE,
        rounding: Rounding | None = None,
        apart: Apart | None = None,
    ) -> None:
        self.jobs: list[jobs.Job] = []
        self._apart = apart
        self._config, self._checkpoint, self._found = config, checkpoint, found
        self._dtype, self._device = dtype, device
        self._slicing, self._rounding = slicing, rounding
        self._cuts = own_cuts(config, slicing, checkpoint.path) if slicing.ranks > 1 else {}

    def weights(self) -> Weights:
        """All weights, not filled yet."""
        at = names.model()
        return Weights(
            embed=self._plain(*at["embed"]),
            layers=[self.layer(i) for i in range(self._config.num_hidden_layers)],
            norm=self._plain(*at["norm"]),
            lm_head=self._linear(*at["lm_head"]),
        )

    def layer(self, i: int) -> Layer:
        """The weights of layer `i`, not filled yet."""
        at = names.layer(i)
        return Layer(
            input_norm=self._plain(*at["input_norm"]),
            attention=self._attention(at),
            post_norm=self._plain(*at["post_norm"]),
            ffn=self._mlp(names.dense(i)) if i < self._config.first_k_dense_replace else self._moe(i, at),
        )

    def _attention(self, at: names.Names) -> Attention:
        w_uk, w_uv = self._split_kv_b(*at["kv_b"])
        return Attention(
            qkv_a=self._linear(*at["qkv_a"]),
            q_a_norm=self._plain(*at["q_a_norm"]),
            q_b=self._linear(*at["q_b"]),
            kv_a_norm=self._plain(*at["kv_a_norm"]),
            w_uk=w_uk,
            w_uv=w_uv,
            o=self._linear(*at["o"]),
        )

    def _mlp(self, at: names.Names) -> Mlp:
        return Mlp(gate_up=self._linear(*at["gate_up"]), down=self._linear(*at["down"]))

    def _moe(self, i: int, at: names.Names) -> Moe:
        return Moe(
            gate=self._plain(*at["gate"], dtype=self._gate_dtype(*at["gate"])),
            bias=self._plain(*at["bias"], dtype=torch.float32),
            experts=self._experts(i),
            shared=self._mlp(names.shared(i)) if self._config.n_shared_experts else None,
        )

    def _gate_dtype(self, name: str) -> torch.dtype:
        """float32, because router scores are computed in it; but on a GPU a gate stored as bfloat16 stays bfloat16."""
        narrow = self._device.type == "cuda" and self._info(name).dtype == torch.bfloat16
        return torch.bfloat16 if narrow else torch.float32

    def _experts(self, layer: int) -> Experts:
        every = [names.expert(layer, e) for e in range(self._config.n_routed_experts)]
        triples = [(*at["gate_up"], *at["down"]) for at in every]
        if self._slicing.whole_experts:
            triples = triples[self._slicing.experts(len(every))]
        count = len(triples)
        kinds = {self._found.formats[name] for triple in triples for name in triple}
        where = f"{self._checkpoint.path}: {self._found.prefix}{names.experts(layer)}"
        if len(kinds) > 1:
            raise CheckpointError(
                f"{where}: the routed experts of a layer must share one format, found {' and '.join(sorted(kinds))}"
            )
        (kind,) = kinds
        if kind not in EXPERTS:
            raise CheckpointError(f"{where}: routed experts in {kind} are not served; served: {', '.join(EXPERTS)}")
        compact = kind == scheme.INT4 and self._rounding is not None
        kind = scheme.INT4_COMPACT if compact else kind
        record, suffixes = EXPERTS[kind]
        gate_ups, downs, halves = [], [], []  # one per suffix; halves [count, 2, ...] are views of gate_ups
        for suffix in suffixes:
            gate, down = (self._held(kind, suffix, name) for name in triples[0][1:])
            if kind == scheme.DENSE:
                dtype = self._dtype
            elif len(gate.dtypes) > 1:
                dtype = self._scale_dtype([name for triple in triples for name in triple])
            else:
                (dtype,) = gate.dtypes
            both = (2 * gate.shape[0], *gate.shape[1:]) if gate.covers == 1 else (2, *gate.shape)
            gate_ups.append(self._empty(count, *both, dtype=dtype))
            downs.append(self._empty(count, *down.shape, dtype=dtype))
            halves.append(gate_ups[-1].view(count, 2, *gate.shape))
        for k, triple in enumerate(triples):
            outs = [x[k, 0] for x in halves], [x[k, 1] for x in halves], [x[k] for x in downs]
            for name, parts in zip(triple, outs):
                if compact:
                    stretches = self._stretches(name)
                    self._job([*stretches.values()], partial(self._compact, name, stretches, parts))
                else:
                    self._fill(name, dict(zip(suffixes, parts)))
        return record(*gate_ups, *downs)

    def _held(self, kind: str, suffix: str, name: str) -> Part:
        """The stored part `suffix`, in format `kind`, of this rank's slice of a linear layer."""
        self._stretches(name)  # refuses parts that would cut groups
        return SERVED[kind].parts(self._shape(name))[suffix]

    def _linear(self, *linears: str) -> Matrix:
        """One linear layer made of several, concatenated along rows. INT4 if all are, dense otherwise."""
        shapes = [self._shape(name) for name in linears]
        rows, inputs = sum(o for o, _ in shapes), shapes[0][1]
        ends = [sum(o for o, _ in shapes[: k + 1]) for k in range(len(linears))]
        slices = [slice(end - o, end) for end, (o, _) in zip(ends, shapes)]
        if all(self._found.formats[name] == scheme.INT4 for name in linears):
            for name in linears:
                self._stretches(name)  # refuses parts that would cut groups
            weight = self._empty(rows, inputs // 8, dtype=torch.int32)
            scale = self._empty(rows, inputs // scheme.INT4_GROUP, dtype=self._scale_dtype(linears))
            for name, part in zip(linears, slices):
                self._fill(name, {".weight_packed": weight[part], ".weight_scale": scale[part]})
            return Matrix(weight, scale)
        apart = self._apart
        dense = Matrix(self._empty(rows, inputs) if apart is None else apart.empty((rows, inputs), self._dtype))
        for name, part in zip(linears, slices):
            self._fill_dense(name, dense.weight[part])
        return dense

    def _split_kv_b(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._config
        n, v, latent = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
        heads = self._shape(name)[0] // (n + v)
        w_uk, w_uv = self._empty(heads, n, latent), self._empty(heads, latent, v)

        def split(stage: jobs.Stage) -> None:
            self._count_shared(name, stage)
            heads_first = self._read(name, self._cut(name)[0], stage).view(heads, n + v, latent)
            w_uk.copy_(heads_first[:, :n])
            w_uv.copy_(heads_first[:, n:].transpose(1, 2))

        self._job([*self._stretches(name).values()], split)
        return w_uk, w_uv

    def _plain(self, name: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        stretch = Stretch.whole(self._info(name))
        if name in self._cuts:
            stretch = Stretch(stretch.info, self._cuts[name])
        out = self._empty(*stretch.shape, dtype=dtype)
        self._job([stretch], partial(self._copy, stretch, out))
        return out

    def _fill_dense(self, name: str, out: torch.Tensor) -> None:
        if self._found.formats[name] == scheme.DENSE:
            self._fill(name, {".weight": out})
        else:
            self._job([*self._stretches(name).values()], partial(self._dequantize, name, out))

    def _dequantize(self, name: str, out: torch.Tensor, stage: jobs.Stage) -> None:
        self._count_shared(name, stage)
        step, first = row_step(out.shape[1]), self._cut(name)[0].start
        for start in range(0, out.shape[0], step):
            stop = min(start + step, out.shape[0])
            out[start:stop] = self._read(name, slice(first + start, first + stop), stage)

    def _count_shared(self, name: str, stage: jobs.Stage) -> None:
        """Counts the bytes of parts that belong to all rows; `_read` reads them with every piece, uncounted."""
        stage.advance(sum(s.nbytes for s in self._stretches(name).values() if s.part is not None and not s.part.covers))

    def _read(self, name: str, rows: slice, stage: jobs.Stage) -> torch.Tensor:
        """The given rows of the linear layer, dequantised, in this rank's columns."""
        return read_linear(
            self._checkpoint,
            self._found,
            name,
            self._dtype,
            rows=rows,
            columns=self._cut(name)[1],
            device=self._device,
            advance=stage.advance,
        )

    def _compact(
        self, name: str, stretches: Mapping[str, Stretch], outs: Sequence[torch.Tensor], stage: jobs.Stage
    ) -> None:
        """Converts stored INT4 to packed weights, compact scales and row scales, on the device."""
        stored = {}
        for suffix, stretch in stretches.items():
            piece = stretch.empty()
            stretch.read(self._checkpoint, piece)
            stored[suffix] = piece.to(self._device)
            stage.advance(piece.nbytes)
        try:
            *made, lost = int4_compact.compacted(stored[".weight_packed"], stored[".weight_scale"])
        except ValueError as e:
            raise CheckpointError(f"{self._checkpoint.path}: tensor {stretches['.weight_scale'].info.name}: {e}") from e
        for out, values in zip(outs, made):
            out.copy_(values)
        assert self._rounding is not None
        self._rounding.add(name, lost)

    def _fill(self, name: str, outs: Mapping[str, torch.Tensor]) -> None:
        """Copies a linear layer's stored parts to `outs`, by suffix; a part that is not in `outs` is only checked."""
        for suffix, stretch in self._stretches(name).items():
            if stretch.part is not None and stretch.part.covers:
                self._job([stretch], partial(self._copy, stretch, outs[suffix]))
            else:
                self._job([stretch], partial(self._copy_whole, stretch, outs.get(suffix)))

    def _copy_whole(self, stretch: Stretch, out: torch.Tensor | None, stage: jobs.Stage) -> None:
        stored = stretch.empty()
        stretch.read(self._checkpoint, stored)
        if out is not None:
            reciprocal = stretch.part is not None and stretch.part.reciprocal
            out.copy_((stored.reciprocal() if reciprocal else stored).reshape(out.shape))
        stage.advance(stretch.nbytes)

    def _copy(self, stretch: Stretch, out: torch.Tensor, stage: jobs.Stage) -> None:
        """Fills `out`, of the stretch's shape, in pieces of rows: directly if no conversion or device copy is needed,
        else through the staging buffer."""
        info = stretch.info
        assert out.shape == stretch.shape, (out.shape, stretch)
        direct = out.device.type == "cpu" and out.dtype == info.dtype and out.is_contiguous()
        row = info.nbytes // max(info.shape[0], 1)  # bytes of a whole row in the file, also if columns are cut
        step = max(jobs.STAGE_BYTES // max(row, 1), 1)
        for start in range(0, out.shape[0], step):
            piece = out[start : start + step]
            source = piece if direct else stage.view(info.dtype, piece.shape, piece.numel())
            stretch.rows(start, step).read(self._checkpoint, source)
            if not direct:
                piece.copy_(source)
            stage.advance(source.nbytes)

    def _scale_dtype(self, linears: Sequence[str]) -> torch.dtype:
        """The type of all these layers' scales; float32, which holds the others exactly, if they differ."""
        dtypes = {self._info(f"{name}.weight_scale").dtype for name in linears}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _cut(self, linear: str) -> tuple[slice, ...]:
        """This rank's rows and columns."""
        return self._cuts.get(linear) or tuple(slice(0, n) for n in self._found.shapes[linear])

    def _shape(self, linear: str) -> tuple[int, ...]:
        return tuple(own.stop - own.start for own in self._cut(linear))

    def _stretches(self, linear: str) -> dict[str, Stretch]:
        return self._found.stretches(linear, *self._cut(linear))

    def _info(self, name: str) -> TensorInfo:
        return self._found.tensors[name]

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _job(self, stretches: Sequence[Stretch], run: Callable[[jobs.Stage], None]) -> None:
        first, nbytes = stretches[0].info, sum(stretch.nbytes for stretch in stretches)
        self.jobs.append(jobs.Job((first.file.name, first.offset), nbytes, run))
