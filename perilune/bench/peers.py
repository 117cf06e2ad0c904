"""Routed INT4 experts of one Kimi K2 layer on a GPU: this project's kernels beside an installed peer's.

Both sides get the same random weights, activations and routing, and are timed as CUDA graphs by turns in one process.
Weights (9.5 GB at full width) do not fit the L2 cache, so that every replay reads them from memory. Our time is that of
the whole op: sorting, gate_up, SwiGLU, down, weighted sum. The peer's is gate_up, SwiGLU (this project's) and down:
its pairs are sorted beforehand, and its results are not summed. No part of the product imports a peer. Named
implementations of ours are timed in the same turns as the one `moe_int4` chooses; compact scales have no peer.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.bench import ledger
from perilune.bench.shapes import shape
from perilune.core.errors import ConfigError
from perilune.ops.harness import build, registry
from perilune.ops.harness.case import BFLOAT16
from perilune.ops.layouts.int4 import GROUP
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.moe_int4 import op as moe_int4
from perilune.ops.pointwise.swiglu import swiglu

SHAPE = "kimi-k2.5"
REPLAYS = 3  # consecutive replays of a graph that are timed together
MAX_ERROR = 2e-2  # of a peer's results against ours, both rounded to bfloat16; a larger error fails the comparison
PACKAGE = "humming-kernels"
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Problem:
    """x [T, D] bfloat16, and the experts of every token."""

    x: Tensor
    chosen: Chosen


def require(beside: bool = True) -> None:
    if beside and importlib.util.find_spec("humming") is None:
        raise ConfigError(f"no peer's kernels are installed: pip install {PACKAGE}")
    if not torch.cuda.is_available():
        raise ConfigError("peers' kernels need a GPU; --cpu compares decoding on a CPU")


class Humming:
    """The experts of one layer in the package humming-kernels, with the settings that it chooses for a size."""

    def __init__(self, gate_up: Matrix, down: Matrix) -> None:
        self._gate_up, self._down = (self._layer(w) for w in (gate_up, down))

    @staticmethod
    def _layer(w: Matrix) -> Any:
        assert w.scale is not None and w.row_scale is None, "scales in bfloat16"
        experts, rows, words = w.weight.shape
        form = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "type": "int",
            "num_bits": 4,
            "strategy": "group",
            "group_size": GROUP,
            "symmetric": True,
        }
        with DEVICE:
            layer = importlib.import_module("humming.layer").HummingLayer(
                rows, 8 * words, form, num_experts=experts, torch_dtype=BFLOAT16
            )
            layer.load_from_tensors({"weight_packed": w.weight, "weight_scale": w.scale})
            layer.transform()
        return layer

    def prepare(self, problem: Problem) -> Callable[[], Tensor]:
        """A call that gives [T k, D] bfloat16, the results of every pair without their weights."""
        ids = problem.chosen.ids
        first = self._product(self._gate_up, ids, ids.shape[1])
        second = self._product(self._down, ids.view(-1, 1), 1)
        return lambda: second(swiglu(first(problem.x)))

    @staticmethod
    def _product(layer: Any, ids: Tensor, k: int) -> Callable[[Tensor], Tensor]:
        choose = importlib.import_module("humming.tune").get_heuristics_config
        setting = choose(layer.humming_config, shape_m=ids.numel(), gemm_type="indexed")
        order, owners = blocks(ids.flatten().cpu(), int(setting["block_shape"][0]))
        order, owners = order.to(DEVICE), owners.to(DEVICE)
        padded = torch.tensor(len(order), dtype=torch.int32, device=DEVICE)
        run = functools.partial(
            layer.forward,
            sorted_ids=order,
            expert_ids=owners,
            num_tokens_padded=padded,
            top_k=k,
            compute_config={"gemm_type": "indexed"},
            tuning_config=setting,
        )
        return lambda x: run(x)


def blocks(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(pairs sorted by expert, each expert's padded to a multiple of `size` with the value len(ids); the expert of each
    block of `size`), int32. ids [pairs] int32 on the CPU."""
    order, owners = [], []
    for expert in ids.unique().tolist():
        pairs = (ids == expert).nonzero().flatten()
        count = -(-len(pairs) // size)
        order.append(torch.nn.functional.pad(pairs, (0, count * size - len(pairs)), value=len(ids)))
        owners += [expert] * count
    return torch.cat(order).int(), torch.tensor(owners, dtype=torch.int32)


@dataclass(frozen=True)
class Sizes:
    """The timed experts: width of each, number, and whether their scales are compact."""

    width: int
    experts: int
    compact: bool = False


def measure(
    tokens: Sequence[int],
    sizes: Sizes,
    *,
    rounds: int,
    impls: Sequence[str] = (),
    beside: bool = True,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row for each number of tokens: microseconds of both sides, medians over `rounds`. `impls`: implementations of
    moe_int4 that are timed too; one that cannot take a number of tokens is not in its row. `beside`: time the peer,
    too; ignored with compact scales, which it lacks."""
    beside = beside and not sizes.compact
    require(beside)
    config, width = shape(SHAPE, 1), sizes.width
    generator = torch.Generator(DEVICE).manual_seed(1)
    make = _compact_weights if sizes.compact else _weights
    gate_up = make(sizes.experts, 2 * width, config.hidden_size, generator)
    down = make(sizes.experts, config.hidden_size, width, generator)
    peer = Humming(gate_up, down) if beside else None
    version = importlib.metadata.version(PACKAGE) if beside else None
    rows = []
    for count in tokens:
        scores = torch.rand(count, sizes.experts, device=DEVICE, generator=generator)
        ids = scores.topk(config.num_experts_per_tok)[1].int().contiguous()
        weights = torch.rand(ids.shape, device=DEVICE, generator=generator) + 0.1
        x = torch.randn(count, config.hidden_size, device=DEVICE, generator=generator).to(BFLOAT16)
        problem = Problem(x, Chosen(ids, weights))
        args = (x, problem.chosen, gate_up, down, None, True)
        named = [name for name in impls if moe_int4.refusal(name, args) is None]
        calls: list[Callable[[], Tensor]] = [functools.partial(moe_int4, *args)]
        calls += [functools.partial(_as, name, args) for name in named]
        y = calls[0]()
        errors = {name: _distance(call().sum(1), y.sum(1)) for name, call in zip(named, calls[1:], strict=True)}
        if peer is not None:
            calls.append(peer.prepare(problem))
            errors[PACKAGE] = _distance(_summed(calls[-1](), weights), y.sum(1))
        for name, error in errors.items():
            if not error <= MAX_ERROR:
                raise ConfigError(f"{name} computes something else at {count} tokens: {error:.3f} apart")
        us = [round(t, 1) for t in _by_turns([_graph(call) for call in calls], rounds)]
        usual, _ = moe_int4.explain(args)
        row = {
            "bench": "experts",
            "shape": SHAPE,
            "layers": 1,
            "tp": 1,
            "ep": 1,
            **({} if width == config.moe_intermediate_size else {"slice": config.moe_intermediate_size // width}),
            "tokens": count,
            "width": width,
            "expert_format": "int4-compact" if sizes.compact else "int4-g32",
            "exchange": "none",
            "impl": usual.name if usual else None,
            "us": us[0],
            "impls_us": dict(zip(named, us[1:])),
            "peer": PACKAGE if peer else None,
            "peer_version": version,
            "peer_us": us[-1] if peer else None,
            "ratio": round(us[-1] / us[0], 3) if peer else None,
            "sm_mhz": _clock(),
            "method": f"medians of {rounds} rounds of {REPLAYS} graph replays by turns, the peer with its own settings",
            **ledger.circumstances(),
            "gpus": 1,
        }
        line = f"{count:>6} tokens  {row['impl']} {us[0]:>9,.1f} us"
        line += "".join(f"  {name} {t:>9,.1f}" for name, t in zip(named, us[1:]))
        report(line + (f"  {PACKAGE} {us[-1]:>9,.1f} ({row['ratio']:.2f})" if peer else ""))
        rows.append(row)
    return rows


def _as(impl: str, args: tuple[Any, ...]) -> Tensor:
    with registry.using({moe_int4.name: impl}):
        return moe_int4(*args)


def _weights(experts: int, rows: int, width: int, generator: torch.Generator) -> Matrix:
    words = torch.randint(
        -(1 << 31), (1 << 31) - 1, (experts, rows, width // 8), dtype=torch.int32, device=DEVICE, generator=generator
    )
    scale = torch.rand(experts, rows, width // GROUP, device=DEVICE, generator=generator) * 0.5 + 0.75
    return Matrix(words, (scale * (width**-0.5 / 4.6)).to(BFLOAT16))


def _compact_weights(experts: int, rows: int, width: int, generator: torch.Generator) -> Matrix:
    w = _weights(experts, rows, width, generator)
    assert w.scale is not None
    largest = w.scale.amax(-1)
    return Matrix(w.weight, (w.scale * (255 / largest.float()).unsqueeze(-1)).round().to(torch.uint8), largest)


def _summed(pairs: Tensor, weights: Tensor) -> Tensor:
    return (pairs.view(*weights.shape, -1).float() * weights.unsqueeze(-1)).sum(1)


def _distance(y: Tensor, ours: Tensor) -> float:
    return float((y - ours).norm() / ours.norm())


def _graph(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def _by_turns(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> list[float]:
    """Microseconds of a replay of each, medians."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(rounds):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / REPLAYS * 1000)
    return [statistics.median(found) for found in times]


def _clock() -> int | None:
    """Current SM clock of the timed GPU, MHz; None without nvidia-smi."""
    # By its UUID: nvidia-smi also counts GPUs that CUDA_VISIBLE_DEVICES hides.
    gpu = build.uuid(torch.cuda.current_device()).decode()
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--id={gpu}", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout
        return int(found.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
