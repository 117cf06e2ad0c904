"""From a model directory to weights in memory.

First every tensor's name, shape and type is checked against the configuration, then all destinations are allocated,
then threads fill them straight from the files. Beyond the weights themselves each thread holds one staging buffer of
STAGE_BYTES, and for a moment one matrix that has to be rearranged or dequantised (kv_b_proj: 17 MB in Kimi K2).
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from perilune.core.errors import CheckpointError, ConfigError
from perilune.formats import int4, scheme
from perilune.formats.checkpoint import Checkpoint, few
from perilune.formats.dense import FLOATS
from perilune.formats.parts import Part
from perilune.formats.registry import SERVED, format_of, require_served
from perilune.formats.safetensors_file import TensorInfo
from perilune.model.config import KimiConfig
from perilune.model.weights import (
    Attention,
    Dense,
    DenseExperts,
    Experts,
    Int4,
    Int4Experts,
    Layer,
    Linear,
    Mlp,
    Moe,
    Weights,
)

STAGE_BYTES = 1 << 25
MAX_THREADS = 8  # one H200 took 14.8 GB/s from the page cache with 8, 12.6 with 16
NESTED_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
SKIPPED_SUFFIX = ".rotary_emb.inv_freq"
SHAPE_SUFFIX = ".weight_shape"

log = logging.getLogger(__name__)


def load(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    threads: int | None = None,
    progress: bool = False,
) -> tuple[KimiConfig, Weights]:
    """The configuration and weights of the checkpoint in `path`.

    dtype     of every floating-point weight but the router (float32) and quantisation scales (as stored)
    threads   reading at once; default: one per CPU, at most 8
    progress  show a bar on stderr

    Raises CheckpointError naming what is wrong with the directory, ConfigError if the weights do not fit the device.
    """
    config = KimiConfig.from_directory(path)
    require_served(config.quantization, str(path))
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        found = survey(checkpoint, config)
        if found.vision_tensors:
            log.info(
                "%d vision tensors (%.2f GB) left out: only text is served",
                found.vision_tensors,
                found.vision_bytes / 1e9,
            )
        plan = _Plan(config, checkpoint, found, dtype, torch.device(device))
        try:
            weights = plan.weights()
        except RuntimeError as e:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
            raise ConfigError(
                f"{path}: cannot allocate the weights ({found.text_bytes / 1e9:.1f} GB as stored) as {_spell(dtype)} "
                f"on {device}: {str(e).splitlines()[0]}"
            ) from e
        with _progress(path.name, found.text_bytes) if progress else contextlib.nullcontext(_ignore) as advance:
            # Out of the plan, which they refer to: the cycle would keep a closed model's weights alive.
            jobs, plan.jobs = plan.jobs, []
            _run(jobs, threads or min(MAX_THREADS, os.cpu_count() or 1), torch.device(device), advance)
    return config, weights


def expected(config: KimiConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the text model, unquantised and without prefix."""
    c, d = config, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, d)}

    def mlp(at: str, width: int) -> None:
        shapes[f"{at}.gate_proj.weight"] = shapes[f"{at}.up_proj.weight"] = (width, d)
        shapes[f"{at}.down_proj.weight"] = (d, width)

    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}"
        attn = f"{layer}.self_attn"
        kv_b = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
        shapes |= {
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
            f"{attn}.q_a_proj.weight": (c.q_lora_rank, d),
            f"{attn}.q_a_layernorm.weight": (c.q_lora_rank,),
            f"{attn}.q_b_proj.weight": (c.num_attention_heads * c.qk_head_dim, c.q_lora_rank),
            f"{attn}.kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, d),
            f"{attn}.kv_a_layernorm.weight": (c.kv_lora_rank,),
            f"{attn}.kv_b_proj.weight": (kv_b, c.kv_lora_rank),
            f"{attn}.o_proj.weight": (d, c.num_attention_heads * c.v_head_dim),
        }
        if i < c.first_k_dense_replace:
            mlp(f"{layer}.mlp", c.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (c.n_routed_experts, d)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
        for e in range(c.n_routed_experts):
            mlp(f"{layer}.mlp.experts.{e}", c.moe_intermediate_size)
        if c.n_shared_experts:
            mlp(f"{layer}.mlp.shared_experts", c.n_shared_experts * c.moe_intermediate_size)
    shapes["model.norm.weight"] = (d,)
    shapes["lm_head.weight"] = (c.vocab_size, d)
    return shapes


def is_linear(name: str) -> bool:
    """Whether an expected tensor is a linear layer's weight, which a checkpoint may store quantised."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) or name == "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Survey:
    """What a checkpoint holds, found consistent with its configuration."""

    prefix: str  # before every name of `expected`
    formats: Mapping[str, str]  # of each linear layer, by its name without prefix and ".weight"
    text_bytes: int
    vision_tensors: int
    vision_bytes: int


def survey(checkpoint: Checkpoint, config: KimiConfig) -> Survey:
    """Checks all names, shapes and types; reads no data. CheckpointError names the first few that are wrong."""
    tensors, where = checkpoint.tensors, checkpoint.path
    prefix = NESTED_PREFIX if any(name.startswith(NESTED_PREFIX) for name in tensors) else ""
    formats: dict[str, str] = {}
    wanted: dict[str, Part] = {}
    for name, shape in expected(config).items():
        if not is_linear(name):
            wanted[prefix + name] = Part(shape, FLOATS)
            continue
        linear = name.removesuffix(".weight")
        form = format_of(tensors, prefix + linear) or scheme.DENSE
        require_served(form, f"{where}: tensor {prefix + linear}")
        formats[linear] = form
        wanted |= {prefix + linear + suffix: part for suffix, part in SERVED[form](shape).items()}

    if missing := [name for name in wanted if name not in tensors]:
        raise CheckpointError(f"{where} lacks {few(missing, 'tensor')}")
    vision = [t for name, t in tensors.items() if name.startswith(VISION_PREFIXES)]
    surplus = [
        name
        for name in tensors
        if name not in wanted and not name.startswith(VISION_PREFIXES) and not name.endswith(SKIPPED_SUFFIX)
    ]
    if surplus:
        raise CheckpointError(f"{where} holds {few(surplus, 'tensor')} that are no part of the model in config.json")
    for name, part in wanted.items():
        info = tensors[name]
        if info.shape != part.shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(info.shape)}, config.json asks for {list(part.shape)}"
            )
        if info.dtype not in part.dtypes:
            allowed = " or ".join(_spell(d) for d in part.dtypes)
            raise CheckpointError(f"{where}: tensor {name} is {_spell(info.dtype)}, not {allowed}")
    return Survey(
        prefix=prefix,
        formats=formats,
        text_bytes=sum(tensors[name].nbytes for name in wanted),
        vision_tensors=len(vision),
        vision_bytes=sum(t.nbytes for t in vision),
    )


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Advance = Callable[[int], None]


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
        self, config: KimiConfig, checkpoint: Checkpoint, found: Survey, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.jobs: list[_Job] = []
        self._config, self._checkpoint, self._found = config, checkpoint, found
        self._dtype, self._device = dtype, device

    def weights(self) -> Weights:
        return Weights(
            embed=self._plain("model.embed_tokens.weight"),
            layers=[self._layer(i) for i in range(self._config.num_hidden_layers)],
            norm=self._plain("model.norm.weight"),
            lm_head=self._linear("lm_head"),
        )

    def _layer(self, i: int) -> Layer:
        at = f"model.layers.{i}"
        return Layer(
            input_norm=self._plain(f"{at}.input_layernorm.weight"),
            attention=self._attention(f"{at}.self_attn"),
            post_norm=self._plain(f"{at}.post_attention_layernorm.weight"),
            ffn=self._mlp(f"{at}.mlp") if i < self._config.first_k_dense_replace else self._moe(f"{at}.mlp"),
        )

    def _attention(self, at: str) -> Attention:
        w_uk, w_uv = self._split_kv_b(f"{at}.kv_b_proj")
        return Attention(
            qkv_a=self._linear(f"{at}.q_a_proj", f"{at}.kv_a_proj_with_mqa"),
            q_a_norm=self._plain(f"{at}.q_a_layernorm.weight"),
            q_b=self._linear(f"{at}.q_b_proj"),
            kv_a_norm=self._plain(f"{at}.kv_a_layernorm.weight"),
            w_uk=w_uk,
            w_uv=w_uv,
            o=self._linear(f"{at}.o_proj"),
        )

    def _mlp(self, at: str) -> Mlp:
        return Mlp(gate_up=self._linear(f"{at}.gate_proj", f"{at}.up_proj"), down=self._linear(f"{at}.down_proj"))

    def _moe(self, at: str) -> Moe:
        return Moe(
            gate=self._plain(f"{at}.gate.weight", torch.float32),
            bias=self._plain(f"{at}.gate.e_score_correction_bias", torch.float32),
            experts=self._experts(f"{at}.experts"),
            shared=self._mlp(f"{at}.shared_experts") if self._config.n_shared_experts else None,
        )

    def _experts(self, at: str) -> Experts:
        c = self._config
        e, d, i = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        pairs = [(f"{at}.{k}.gate_proj", f"{at}.{k}.up_proj") for k in range(e)]
        downs = [f"{at}.{k}.down_proj" for k in range(e)]
        names = [name for pair in pairs for name in pair] + downs
        kinds = {self._found.formats[name] for name in names}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{self._checkpoint.path}: {self._found.prefix}{at}: the routed experts of a layer must share one "
                f"format, found {' and '.join(sorted(kinds))}"
            )
        if kinds == {scheme.DENSE}:
            dense = DenseExperts(gate_up=self._empty(e, 2 * i, d), down=self._empty(e, d, i))
            for k in range(e):
                self._fill_dense(pairs[k][0], dense.gate_up[k, :i])
                self._fill_dense(pairs[k][1], dense.gate_up[k, i:])
                self._fill_dense(downs[k], dense.down[k])
            return dense
        scales = self._scale_dtype(names)
        packed = Int4Experts(
            gate_up_packed=self._empty(e, 2 * i, d // 8, dtype=torch.int32),
            gate_up_scale=self._empty(e, 2 * i, d // scheme.INT4_GROUP, dtype=scales),
            down_packed=self._empty(e, d, i // 8, dtype=torch.int32),
            down_scale=self._empty(e, d, i // scheme.INT4_GROUP, dtype=scales),
        )
        for k in range(e):
            self._fill_int4(pairs[k][0], packed.gate_up_packed[k, :i], packed.gate_up_scale[k, :i])
            self._fill_int4(pairs[k][1], packed.gate_up_packed[k, i:], packed.gate_up_scale[k, i:])
            self._fill_int4(downs[k], packed.down_packed[k], packed.down_scale[k])
        return packed

    def _linear(self, *names: str) -> Linear:
        """One linear layer made of several, one below the other. INT4 if all are, dense otherwise."""
        shapes = [self._shape(name) for name in names]
        rows, inputs = sum(o for o, _ in shapes), shapes[0][1]
        ends = [sum(o for o, _ in shapes[: k + 1]) for k in range(len(names))]
        slices = [slice(end - o, end) for end, (o, _) in zip(ends, shapes)]
        if all(self._found.formats[name] == scheme.INT4 for name in names):
            packed = Int4(
                packed=self._empty(rows, inputs // 8, dtype=torch.int32),
                scale=self._empty(rows, inputs // scheme.INT4_GROUP, dtype=self._scale_dtype(names)),
            )
            for name, part in zip(names, slices):
                self._fill_int4(name, packed.packed[part], packed.scale[part])
            return packed
        dense = Dense(self._empty(rows, inputs))
        for name, part in zip(names, slices):
            self._fill_dense(name, dense.weight[part])
        return dense

    def _split_kv_b(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        c = self._config
        heads, n, v, latent = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
        w_uk, w_uv = self._empty(heads, n, latent), self._empty(heads, latent, v)

        def split(stage: _Stage) -> None:
            heads_first = self._read_dense(name, stage).view(heads, n + v, latent)
            w_uk.copy_(heads_first[:, :n])
            w_uv.copy_(heads_first[:, n:].transpose(1, 2))

        self._job(self._first_part(name), split)
        return w_uk, w_uv

    def _plain(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        info = self._info(name)
        out = self._empty(*info.shape, dtype=dtype)
        self._job(info, partial(self._copy, info, out))
        return out

    def _fill_dense(self, name: str, out: torch.Tensor) -> None:
        if self._found.formats[name] == scheme.DENSE:
            info = self._info(f"{name}.weight")
            self._job(info, partial(self._copy, info, out))
        else:

            def dequantize(stage: _Stage) -> None:
                out.copy_(self._read_dense(name, stage))

            self._job(self._first_part(name), dequantize)

    def _fill_int4(self, name: str, packed: torch.Tensor, scale: torch.Tensor) -> None:
        words, scales = self._info(f"{name}.weight_packed"), self._info(f"{name}.weight_scale")
        shape = self._info(name + SHAPE_SUFFIX)
        self._job(words, partial(self._copy, words, packed))
        self._job(scales, partial(self._copy, scales, scale, finite=True))
        self._job(shape, partial(self._check_shape, name, shape))

    def _read_dense(self, name: str, stage: _Stage) -> torch.Tensor:
        """The whole matrix on the CPU, dequantised if need be."""
        if self._found.formats[name] == scheme.DENSE:
            weight = self._checkpoint.read(self._info(f"{name}.weight").name)
            stage.advance(weight.nbytes)
            return weight
        scale_info = self._info(f"{name}.weight_scale")
        packed = self._checkpoint.read(self._info(f"{name}.weight_packed").name)
        scale = self._checkpoint.read(scale_info.name)
        self._require_finite(scale_info, scale)
        self._check_shape(name, self._info(name + SHAPE_SUFFIX), stage)
        stage.advance(packed.nbytes + scale.nbytes)
        return int4.dequantize(packed, scale, self._dtype)

    def _copy(self, info: TensorInfo, out: torch.Tensor, stage: _Stage, *, finite: bool = False) -> None:
        """Fills `out`, of info's shape, in pieces of whole rows: in place where bytes need no change, else staged."""
        assert out.shape == info.shape, (out.shape, info)
        direct = out.device.type == "cpu" and out.dtype == info.dtype and out.is_contiguous()
        row = info.nbytes // max(info.shape[0], 1)
        step = max(STAGE_BYTES // max(row, 1), 1)
        for start in range(0, info.shape[0], step):
            piece = out[start : start + step]
            source = piece if direct else stage.view(info.dtype, piece.shape, piece.numel())
            self._checkpoint.read_into(info, source, start * row)
            if finite:
                self._require_finite(info, source)
            if not direct:
                piece.copy_(source)
            stage.advance(source.nbytes)

    def _check_shape(self, name: str, info: TensorInfo, stage: _Stage) -> None:
        stored = self._checkpoint.read(info.name).tolist()
        stage.advance(info.nbytes)
        if stored != list(self._shape(name)):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {info.name} says {stored}, the packed weight beside it is "
                f"{list(self._shape(name))}"
            )

    def _require_finite(self, info: TensorInfo, scale: torch.Tensor) -> None:
        if not scale.isfinite().all():
            raise CheckpointError(f"{self._checkpoint.path}: tensor {info.name} holds scales that are not finite")

    def _scale_dtype(self, names: Sequence[str]) -> torch.dtype:
        """The type of all these layers' scales; float32, which holds the others exactly, if they differ."""
        dtypes = {self._info(f"{name}.weight_scale").dtype for name in names}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def _shape(self, name: str) -> tuple[int, int]:
        """(o, i) of a linear layer."""
        if self._found.formats[name] == scheme.DENSE:
            out, inputs = self._info(f"{name}.weight").shape
            return out, inputs
        out, words = self._info(f"{name}.weight_packed").shape
        return out, words * 8

    def _first_part(self, name: str) -> TensorInfo:
        return self._info(f"{name}.weight" if self._found.formats[name] == scheme.DENSE else f"{name}.weight_packed")

    def _info(self, name: str) -> TensorInfo:
        return self._checkpoint.info(self._found.prefix + name)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _job(self, first: TensorInfo, run: Callable[[_Stage], None]) -> None:
        self.jobs.append(_Job((first.file.name, first.offset), run))


def _run(jobs: list[_Job], threads: int, device: torch.device, advance: Advance) -> None:
    """Runs every job; the first error stops the rest and is raised here."""
    queue = deque(sorted(jobs, key=lambda job: job.at))

    def work() -> None:
        stage = _Stage(device, advance)
        with torch.no_grad():  # a thread's own setting
            while queue:
                try:
                    job = queue.popleft()
                except IndexError:  # another thread took the last one
                    return
                job.run(stage)

    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        running = [pool.submit(work) for _ in range(threads)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            queue.clear()  # an error, or the user's interrupt: nothing more is started
    for future in running:
        future.result()


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
