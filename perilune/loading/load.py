"""From a model directory to weights in memory.

First every tensor's name, shape and type is checked against the configuration, then all destinations are allocated,
then threads fill them straight from the files. Beyond the weights themselves each thread holds one staging buffer of
STAGE_BYTES, and for a moment rows that have to be rearranged or dequantised: kv_b_proj's (17 MB in Kimi K2), or about
STAGE_BYTES as float32 of another matrix.

Routed experts stay in the format of the checkpoint, whatever it is: they are nearly all of the model. So do other
linear layers in INT4. All others are dequantised to the load's dtype here, once: in Kimi K2 they are 1.1 % of the
parameters, and ops then know one kind of them.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from perilune.core.errors import CheckpointError, ConfigError
from perilune.formats import scheme
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.fp8_block import BLOCK as FP8_BLOCK
from perilune.formats.fp8_block import blocks as fp8_blocks
from perilune.formats.safetensors_file import TensorInfo
from perilune.formats.served import require_served
from perilune.formats.stored import Part
from perilune.loading.survey import Survey, read_linear, require_sound, spell, survey
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.weights import (
    Attention,
    Dense,
    DenseExperts,
    Experts,
    Fp8Experts,
    Int4,
    Int4CompactExperts,
    Int4Experts,
    Layer,
    Linear,
    Mlp,
    Moe,
    NvFp4Experts,
    Weights,
)

STAGE_BYTES = 1 << 25
MAX_THREADS = 8  # one H200 took 14.8 GB/s from the page cache with 8, 12.6 with 16

log = logging.getLogger(__name__)


def load(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    threads: int | None = None,
    progress: bool = False,
    part: tuple[int, int] = (0, 1),
) -> tuple[KimiConfig, Weights]:
    """The configuration and weights of the checkpoint in `path`.

    dtype     of every floating-point weight but the router (float32) and quantisation scales (as stored)
    threads   reading at once; default: one per CPU, at most 8
    progress  show a bar on stderr
    part      (rank, ranks): hold only the routed experts with ids from E * rank // ranks to E * (rank + 1) // ranks,
              and everything else whole. Of other ranks' experts no byte is read.

    Raises CheckpointError naming what is wrong with the directory, ConfigError if the weights do not fit the device.
    An interrupt ends it when the pieces that are being read are complete, with no thread left.
    """
    config = KimiConfig.from_directory(path)
    rank, ranks = part
    if not 0 <= rank < ranks <= config.n_routed_experts:
        raise ConfigError(f"part={part}: rank must be below ranks, and these at most {config.n_routed_experts} experts")
    require_served(config.quantization, str(path))
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        found = survey(checkpoint, config)
        if found.vision_tensors:
            log.info(
                "%d vision tensors (%.2f GB) left out: only text is served",
                found.vision_tensors,
                found.vision_bytes / 1e9,
            )
        plan = _Plan(config, checkpoint, found, dtype, torch.device(device), part)
        try:
            weights = plan.weights()
        except RuntimeError as e:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
            raise ConfigError(
                f"{path}: cannot allocate the weights ({found.text_bytes / 1e9:.1f} GB as stored) as {spell(dtype)} "
                f"on {device}: {str(e).splitlines()[0]}"
            ) from e
        total = found.text_bytes - plan.left_out
        with _progress(path.name, total) if progress else contextlib.nullcontext(_ignore) as advance:
            # Out of the plan, which they refer to: the cycle would keep a closed model's weights alive.
            jobs, plan.jobs = plan.jobs, []
            _run(jobs, threads or default_threads(), torch.device(device), advance)
    return config, weights


def layers(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, threads: int | None = None
) -> Iterator[Layer]:
    """The layers of the checkpoint in `path`, in order, each loaded when it is asked for: whoever keeps none needs no
    device that holds the model. Raises as `load`."""
    config = KimiConfig.from_directory(path)
    require_served(config.quantization, str(path))
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        plan = _Plan(config, checkpoint, survey(checkpoint, config), dtype, torch.device(device))
        for number in range(config.num_hidden_layers):
            try:
                layer = plan.layer(number)
            except RuntimeError as e:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
                raise ConfigError(
                    f"{path}: cannot allocate layer {number} as {spell(dtype)} on {device}: {str(e).splitlines()[0]}"
                ) from e
            _run(plan.jobs, threads or default_threads(), torch.device(device), _ignore)
            plan.jobs.clear()
            yield layer
            del layer  # nor may a job refer to it: it would be there beside the next one


def default_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def row_step(inputs: int) -> int:
    """How many rows of a matrix with so many inputs to dequantise at once: STAGE_BYTES of float32, whole FP8 blocks."""
    return max(STAGE_BYTES // (4 * inputs) // FP8_BLOCK, 1) * FP8_BLOCK


Advance = Callable[[int], None]
Triple = tuple[str, ...]


def _ignore(_: int) -> None: ...


@dataclass(slots=True)
class _Stage:
    """A thread's memory between file and device, allocated when first needed; pinned if the device is a GPU."""

    device: torch.device
    advance: Advance
    _bytes: torch.Tensor | None = field(default=None)

    def view(self, dtype: torch.dtype, shape: Sequence[int], count: int) -> torch.Tensor:
        if self._bytes is None:
            pin = self.device.type == "cuda"
            self._bytes = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=pin)
        return self._bytes[: count * dtype.itemsize].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _Job:
    """Fills one destination; `at` orders jobs as their bytes lie in the files."""

    at: tuple[str, int]
    run: Callable[[_Stage], None]


class _Plan:
    """Allocates the weights and collects the jobs that fill them."""

    def __init__(
        self,
        config: KimiConfig,
        checkpoint: Checkpoint,
        found: Survey,
        dtype: torch.dtype,
        device: torch.device,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.jobs: list[_Job] = []
        self.left_out = 0  # bytes of other ranks' experts
        self._rank, self._ranks = part
        self._config, self._checkpoint, self._found = config, checkpoint, found
        self._dtype, self._device = dtype, device

    def weights(self) -> Weights:
        at = names.model()
        return Weights(
            embed=self._plain(*at["embed"]),
            layers=[self.layer(i) for i in range(self._config.num_hidden_layers)],
            norm=self._plain(*at["norm"]),
            lm_head=self._linear(*at["lm_head"]),
        )

    def layer(self, i: int) -> Layer:
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
        """float32, which all scores are computed in; a GPU reads a gate stored as bfloat16 as it is."""
        narrow = self._device.type == "cuda" and self._info(name).dtype == torch.bfloat16
        return torch.bfloat16 if narrow else torch.float32

    def _experts(self, layer: int) -> Experts:
        c = self._config
        d, i = c.hidden_size, c.moe_intermediate_size
        every = [names.expert(layer, e) for e in range(c.n_routed_experts)]
        triples = [(*at["gate_up"], *at["down"]) for at in every]
        first, last = (c.n_routed_experts * n // self._ranks for n in (self._rank, self._rank + 1))
        self.left_out += sum(self._bytes(*triple) for triple in triples[:first] + triples[last:])
        triples, e = triples[first:last], last - first
        kinds = {self._found.formats[name] for triple in triples for name in triple}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{self._checkpoint.path}: {self._found.prefix}{names.experts(layer)}: the routed experts of a layer "
                f"must share one format, found {' and '.join(sorted(kinds))}"
            )
        (kind,) = kinds
        if kind == scheme.DENSE:
            return self._dense_experts(triples, e, d, i)
        if kind == scheme.INT4:
            return self._int4_experts(triples, e, d, i)
        if kind == scheme.INT4_COMPACT:
            return self._int4_compact_experts(triples, e, d, i)
        if kind == scheme.FP8_BLOCK:
            return self._fp8_experts(triples, e, d, i)
        suffixes = {
            scheme.NVFP4: (".weight", ".weight_scale", ".weight_scale_2"),
            scheme.NVFP4_PACKED: (".weight_packed", ".weight_scale", ".weight_global_scale"),
        }
        return self._nvfp4_experts(triples, e, d, i, suffixes[kind])

    # What follows takes (gate, up, down) names of each expert; e experts of d inputs and width i.

    def _dense_experts(self, triples: Sequence[Triple], e: int, d: int, i: int) -> DenseExperts:
        dense = DenseExperts(gate_up=self._empty(e, 2 * i, d), down=self._empty(e, d, i))
        for (gate, up, down), both, one in zip(triples, dense.gate_up, dense.down):
            self._fill(gate, {".weight": both[:i]})
            self._fill(up, {".weight": both[i:]})
            self._fill(down, {".weight": one})
        return dense

    def _int4_experts(self, triples: Sequence[Triple], e: int, d: int, i: int) -> Int4Experts:
        scales = self._scale_dtype([name for triple in triples for name in triple])
        x = Int4Experts(
            gate_up_packed=self._empty(e, 2 * i, d // 8, dtype=torch.int32),
            gate_up_scale=self._empty(e, 2 * i, d // scheme.INT4_GROUP, dtype=scales),
            down_packed=self._empty(e, d, i // 8, dtype=torch.int32),
            down_scale=self._empty(e, d, i // scheme.INT4_GROUP, dtype=scales),
        )
        for k, (gate, up, down) in enumerate(triples):
            for name, half in ((gate, slice(0, i)), (up, slice(i, None))):
                packed, scale = x.gate_up_packed[k, half], x.gate_up_scale[k, half]
                self._fill(name, {".weight_packed": packed, ".weight_scale": scale})
            self._fill(down, {".weight_packed": x.down_packed[k], ".weight_scale": x.down_scale[k]})
        return x

    def _int4_compact_experts(self, triples: Sequence[Triple], e: int, d: int, i: int) -> Int4CompactExperts:
        x = Int4CompactExperts(
            gate_up_packed=self._empty(e, 2 * i, d // 8, dtype=torch.int32),
            gate_up_scale=self._empty(e, 2 * i, d // scheme.INT4_GROUP, dtype=torch.uint8),
            gate_up_row=self._empty(e, 2 * i, dtype=torch.bfloat16),
            down_packed=self._empty(e, d, i // 8, dtype=torch.int32),
            down_scale=self._empty(e, d, i // scheme.INT4_GROUP, dtype=torch.uint8),
            down_row=self._empty(e, d, dtype=torch.bfloat16),
        )
        suffixes = (".weight_packed", ".weight_scale", ".weight_scale_row")
        gate_up, down = (x.gate_up_packed, x.gate_up_scale, x.gate_up_row), (x.down_packed, x.down_scale, x.down_row)
        for k, triple in enumerate(triples):
            self._fill(triple[0], dict(zip(suffixes, (t[k, :i] for t in gate_up))))
            self._fill(triple[1], dict(zip(suffixes, (t[k, i:] for t in gate_up))))
            self._fill(triple[2], dict(zip(suffixes, (t[k] for t in down))))
        return x

    def _fp8_experts(self, triples: Sequence[Triple], e: int, d: int, i: int) -> Fp8Experts:
        across, along = fp8_blocks(d), fp8_blocks(i)
        x = Fp8Experts(
            gate_up=self._empty(e, 2 * i, d, dtype=torch.float8_e4m3fn),
            gate_up_scale=self._empty(e, 2, along, across, dtype=torch.float32),
            down=self._empty(e, d, i, dtype=torch.float8_e4m3fn),
            down_scale=self._empty(e, across, along, dtype=torch.float32),
        )
        for k, (gate, up, down) in enumerate(triples):
            self._fill(gate, {".weight": x.gate_up[k, :i], ".weight_scale_inv": x.gate_up_scale[k, 0]})
            self._fill(up, {".weight": x.gate_up[k, i:], ".weight_scale_inv": x.gate_up_scale[k, 1]})
            self._fill(down, {".weight": x.down[k], ".weight_scale_inv": x.down_scale[k]})
        return x

    def _nvfp4_experts(
        self, triples: Sequence[Triple], e: int, d: int, i: int, suffixes: tuple[str, str, str]
    ) -> NvFp4Experts:
        """`suffixes` of the packed values, the scales and the global scale."""
        x = NvFp4Experts(
            gate_up_packed=self._empty(e, 2 * i, d // 2, dtype=torch.uint8),
            gate_up_scale=self._empty(e, 2 * i, d // scheme.NVFP4_GROUP, dtype=torch.float8_e4m3fn),
            gate_up_global=self._empty(e, 2, dtype=torch.float32),
            down_packed=self._empty(e, d, i // 2, dtype=torch.uint8),
            down_scale=self._empty(e, d, i // scheme.NVFP4_GROUP, dtype=torch.float8_e4m3fn),
            down_global=self._empty(e, dtype=torch.float32),
        )
        for k, (gate, up, down) in enumerate(triples):
            for half, name, rows in ((0, gate, slice(0, i)), (1, up, slice(i, None))):
                outs = x.gate_up_packed[k, rows], x.gate_up_scale[k, rows], x.gate_up_global[k, half]
                self._fill(name, dict(zip(suffixes, outs)))
            self._fill(down, dict(zip(suffixes, (x.down_packed[k], x.down_scale[k], x.down_global[k]))))
        return x

    def _linear(self, *linears: str) -> Linear:
        """One linear layer made of several, one below the other. INT4 if all are, dense otherwise."""
        shapes = [self._found.shapes[name] for name in linears]
        rows, inputs = sum(o for o, _ in shapes), shapes[0][1]
        ends = [sum(o for o, _ in shapes[: k + 1]) for k in range(len(linears))]
        slices = [slice(end - o, end) for end, (o, _) in zip(ends, shapes)]
        if all(self._found.formats[name] == scheme.INT4 for name in linears):
            packed = Int4(
                packed=self._empty(rows, inputs // 8, dtype=torch.int32),
                scale=self._empty(rows, inputs // scheme.INT4_GROUP, dtype=self._scale_dtype(linears)),
            )
            for name, part in zip(linears, slices):
                self._fill(name, {".weight_packed": packed.packed[part], ".weight_scale": packed.scale[part]})
            return packed
        dense = Dense(self._empty(rows, inputs))
        for name, part in zip(linears, slices):
            self._fill_dense(name, dense.weight[part])
        return dense

    def _split_kv_b(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._config
        heads, n, v, latent = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
        w_uk, w_uv = self._empty(heads, n, latent), self._empty(heads, latent, v)

        def split(stage: _Stage) -> None:
            whole = read_linear(
                self._checkpoint, self._found, name, self._dtype, device=self._device, advance=stage.advance
            )
            heads_first = whole.view(heads, n + v, latent)
            w_uk.copy_(heads_first[:, :n])
            w_uv.copy_(heads_first[:, n:].transpose(1, 2))

        self._job(self._first_part(name), split)
        return w_uk, w_uv

    def _plain(self, name: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        info = self._info(name)
        out = self._empty(*info.shape, dtype=dtype)
        self._job(info, partial(self._copy, info, out))
        return out

    def _fill_dense(self, name: str, out: torch.Tensor) -> None:
        if self._found.formats[name] == scheme.DENSE:
            self._fill(name, {".weight": out})
        else:
            self._job(self._first_part(name), partial(self._dequantize, name, out))

    def _dequantize(self, name: str, out: torch.Tensor, stage: _Stage) -> None:
        step = row_step(out.shape[1])
        for start in range(0, out.shape[0], step):
            rows = slice(start, min(start + step, out.shape[0]))
            out[rows] = read_linear(
                self._checkpoint, self._found, name, self._dtype, rows=rows, device=self._device, advance=stage.advance
            )

    def _fill(self, name: str, outs: Mapping[str, torch.Tensor]) -> None:
        """Copies a linear layer's stored parts to `outs`, by suffix; a part that is not there is only checked."""
        for suffix, part in self._found.parts(name).items():
            info = self._info(name + suffix)
            if part.covers:
                self._job(info, partial(self._copy, info, outs[suffix], part=part))
            else:
                self._job(info, partial(self._copy_whole, info, outs.get(suffix), part))

    def _copy_whole(self, info: TensorInfo, out: torch.Tensor | None, part: Part, stage: _Stage) -> None:
        stored = self._checkpoint.read(info.name)
        require_sound(self._checkpoint, info, part, stored)
        if out is not None:
            out.copy_((stored.reciprocal() if part.reciprocal else stored).reshape(out.shape))
        stage.advance(info.nbytes)

    def _copy(self, info: TensorInfo, out: torch.Tensor, stage: _Stage, *, part: Part | None = None) -> None:
        """Fills `out`, of info's shape, in pieces of whole rows: in place where bytes need no change, else staged."""
        assert out.shape == info.shape, (out.shape, info)
        direct = out.device.type == "cpu" and out.dtype == info.dtype and out.is_contiguous()
        row = info.nbytes // max(info.shape[0], 1)
        step = max(STAGE_BYTES // max(row, 1), 1)
        for start in range(0, info.shape[0], step):
            piece = out[start : start + step]
            source = piece if direct else stage.view(info.dtype, piece.shape, piece.numel())
            self._checkpoint.read_into(info, source, start * row)
            if part is not None:
                require_sound(self._checkpoint, info, part, source)
            if not direct:
                piece.copy_(source)
            stage.advance(source.nbytes)

    def _scale_dtype(self, linears: Sequence[str]) -> torch.dtype:
        """The type of all these layers' scales; float32, which holds the others exactly, if they differ."""
        dtypes = {self._info(f"{name}.weight_scale").dtype for name in linears}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _first_part(self, name: str) -> TensorInfo:
        return self._info(name + next(iter(self._found.parts(name))))

    def _bytes(self, *linears: str) -> int:
        return sum(self._info(name + suffix).nbytes for name in linears for suffix in self._found.parts(name))

    def _info(self, name: str) -> TensorInfo:
        return self._found.tensors[name]

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _job(self, first: TensorInfo, run: Callable[[_Stage], None]) -> None:
        self.jobs.append(_Job((first.file.name, first.offset), run))


class _Stopped(Exception):
    """The load is over for this thread: another one failed, or the user interrupted."""


def _run(jobs: list[_Job], threads: int, device: torch.device, advance: Advance) -> None:
    """Runs every job; the first error stops the rest and is raised here."""
    queue = deque(sorted(jobs, key=lambda job: job.at))
    stopping = threading.Event()
    errors: list[BaseException] = []

    def advance_or_stop(nbytes: int) -> None:
        if stopping.is_set():
            raise _Stopped
        advance(nbytes)

    def work(ended: threading.Event) -> None:
        stage = _Stage(device, advance_or_stop)
        try:
            with torch.no_grad(), contextlib.suppress(_Stopped):  # no_grad is a thread's own setting
                while not stopping.is_set():
                    try:
                        job = queue.popleft()
                    except IndexError:  # another thread took the last one
                        return
                    job.run(stage)
        except BaseException as e:
            errors.append(e)
            stopping.set()
        finally:
            ended.set()

    # Not a pool, nor joined before they end: interrupted in those, Python 3.11 may leave a thread running.
    ends = [threading.Event() for _ in range(threads)]
    readers = [threading.Thread(target=work, args=(ended,), name=f"load-{k}") for k, ended in enumerate(ends)]
    try:
        for reader in readers:
            reader.start()
        for ended in ends:
            ended.wait()
    finally:
        # After the user's interrupt nothing more is started, and what is under way ends with its piece.
        stopping.set()
        for reader, ended in zip(readers, ends):
            if reader.ident is not None:  # else it was not started, or will find that there is nothing to do
                ended.wait()
                reader.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Advance]:
    """A bar on stderr: GB read, GB in all, GB/s."""
    columns = (
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    lock = threading.Lock()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)

        def advance(nbytes: int) -> None:
            with lock:
                bar.advance(task, nbytes)

        yield advance
