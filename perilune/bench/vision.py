"""Time of a picture through a vision tower of Kimi K2.5's size with random weights, whole and in short slices.

`fraction` counts only needed operations: products, and attention over all patches of the picture, without padding of
heads and rows. Each of torch's attention kernels that takes the shapes has a row for the whole picture at once. Serving
encodes it in slices, with the fastest kernel: `served_ms` is one slice, `slices_ms` the shortest ones.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.bench import ledger
from perilune.core.errors import ConfigError
from perilune.engine.vision.cells import Cells
from perilune.engine.vision.tower import sizes_of
from perilune.model import names
from perilune.model.moonvit import Block, MoonVit, MoonVitWeights, normalised
from perilune.model.moonvit_config import MAX_SIDE_PATCHES, MoonVitConfig

K25 = MoonVitConfig(
    patch_size=14, pos_emb_height=64, pos_emb_width=64, pos_emb_time=4, hidden_size=1152, intermediate_size=4304,
    num_hidden_layers=27, num_attention_heads=16, projector_eps=1e-5, text_hidden_size=7168, placeholder=163605,
)  # fmt: skip
CEILING_TFLOP_S = 729.0  # bfloat16 products of an H200, as measured
ATTENTIONS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SLICE_PATCHES = 1024  # The shortest slice on a GPU takes so many patches through half a layer.
PASSES = 7  # timed passes; the first two only warm up

Report = Callable[[str], None]


def measure(sides: Sequence[int], report: Report, *, config: MoonVitConfig = K25) -> list[dict[str, Any]]:
    """Rows of the ledger for square pictures of `sides` patches on a side. ConfigError for an impossible side."""
    if wrong := [side for side in sides if side % 2 or not 2 <= side <= MAX_SIDE_PATCHES]:
        raise ConfigError(f"--patches must be even, from 2 to {MAX_SIDE_PATCHES} on a side, not {wrong[0]}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        tower = MoonVit(config, random_weights(config, device))
        rows = [row for side in sides for row in _rows(tower, side)]
    for row in rows:
        report(
            f"{row['pixels']:>12} pixels, attention {row['attention']:<10}{row['ms']:9.2f} ms (attention alone "
            f"{row['attention_ms']:.2f}), {row['tflops']} TFLOP/s = {100 * row['fraction']:.1f} % of "
            f"{CEILING_TFLOP_S:g}; as served {row['served_ms']:.2f} = {100 * row['served_fraction']:.1f} %, in short "
            f"slices {row['slices_ms']:.2f}"
        )
    return rows


def _rows(tower: MoonVit, side: int) -> list[dict[str, Any]]:
    config, device = tower.config, tower.weights.norm.device
    grid, count = (1, side, side), side * side
    patches = torch.randint(0, 256, (count, 3, config.patch_size, config.patch_size), dtype=torch.uint8, device=device)
    half = (0.5, 0.5, 0.5)
    pixels = normalised(patches, half, half, tower.weights.norm.dtype)
    cells = Cells(sizes_of(tower), count)
    shape = (1, config.num_attention_heads, count, config.head_dim)
    q, k, v = (torch.randn(shape, dtype=pixels.dtype, device=device) for _ in "qkv")

    def in_slices(length: int) -> None:
        """Encodes the picture in slices of `length` cells."""
        state = tower.begin(pixels, [grid])
        for cell in range(1, cells.total, length):
            for run in cells.runs(cell, min(cell + length, cells.total)):
                rows = slice(run.first, run.end)
                if run.kind == "project":
                    tower.project(state, run.layer, rows)
                elif run.kind == "mix":
                    tower.mix(state, run.layer, rows)
                elif run.first == 0:
                    tower.finish(state)

    tower.warm(count)
    served = _milliseconds(lambda: in_slices(cells.total), device)
    apart = _milliseconds(lambda: in_slices(SLICE_PATCHES // (tower.pad or cells.GROUP_PATCHES)), device)
    needed = cells.flops(0, cells.total) / 1e9
    found = []
    for name, backend in ATTENTIONS.items():
        if backend is not None and device.type != "cuda":
            continue
        with contextlib.nullcontext() if backend is None else sdpa_kernel([backend]):
            try:
                ms = _milliseconds(lambda: tower(pixels, [grid]), device)
            except RuntimeError:
                continue  # this attention does not take heads of this width
            alone = _milliseconds(lambda: F.scaled_dot_product_attention(q, k, v), device) * config.num_hidden_layers
        tflops = needed / ms
        found.append(
            {
                "bench": "vision",
                "shape": "kimi-k2.5" if config is K25 else "other",
                "patches": count,
                "pixels": f"{side * config.patch_size} x {side * config.patch_size}",
                "attention": name,
                "rest_dtype": "bf16" if pixels.dtype == torch.bfloat16 else "float32",
                "ms": round(ms, 3),
                "attention_ms": round(alone, 3),
                "served_ms": round(served, 3),
                "served_fraction": round(needed / served / CEILING_TFLOP_S, 4),
                "slices_ms": round(apart, 3),
                "tflops": round(tflops, 1),
                "fraction": round(tflops / CEILING_TFLOP_S, 4),
                "ceiling_tflops": CEILING_TFLOP_S,
                "method": f"one picture, normalised, to rows; median of {PASSES - 2} passes; slices_ms: "
                f"{SLICE_PATCHES} patches of a half layer at a time; served_ms: one slice; random weights",
                **ledger.circumstances(),
            }
        )
    return found


def random_weights(config: MoonVitConfig, device: torch.device) -> MoonVitWeights:
    """Random weights of the tower: bfloat16 on a GPU, else float32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made: dict[str, torch.Tensor] = {}
    for tensor in names.vision_tensors(config):
        scale = (tensor.shape[-1] if len(tensor.shape) == 2 else 64) ** -0.5
        made[tensor.name] = torch.randn(tensor.shape, dtype=dtype, device=device) * scale

    def record(entries: tuple[names.Entry, ...], place: str = "") -> dict[str, torch.Tensor]:
        return {e.field: made[place + e.suffix] for e in entries}

    blocks = [Block(**record(names.VISION_BLOCK, names.vision_block(i))) for i in range(config.num_hidden_layers)]
    return MoonVitWeights(blocks=blocks, **record(names.VISION_ENDS))


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of PASSES passes, without those that warm up."""
    found = []
    for _ in range(PASSES):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found[2:])
