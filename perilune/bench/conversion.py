"""INT4 to NVFP4: how exact, how fast, and what it does to a model, beside the usual recipe.

Weights of one expert's matrix of Kimi K2 are drawn from three distributions and made INT4 as its training makes them
(max|w| / 7 in groups of 32); what is compared are the NVFP4 weights and these INT4 weights.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench import ledger
from perilune.convert import nvfp4 as search
from perilune.convert import report as quality
from perilune.convert.stream import Conversion, decibels
from perilune.convert.target import Target
from perilune.formats import int4, nvfp4

ROWS, INPUTS = 2048, 7168
SPREAD = 0.5  # of the logarithm of rows' and columns' sizes in "lognormal"


def measure(model: Path, *, tokens: int, rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    """One ledger row. The model's experts are INT4."""
    generator = torch.Generator().manual_seed(0)
    row: dict[str, Any] = {"bench": "convert", "rows": ROWS, "inputs": INPUTS}
    seconds: list[float] = []
    for name, draw in DISTRIBUTIONS.items():
        packed, scale = int4.quantize(draw(generator) * 0.02)
        exponent = search.exponent_for([scale.amax()])
        for _ in range(rounds):
            begin = time.perf_counter()
            best = search.from_int4(packed, scale, exponent)
            seconds.append(time.perf_counter() - begin)
        exact = int4.dequantize(packed, scale, torch.float32)
        got = nvfp4.dequantize(best.values, best.scale, torch.tensor(2.0**exponent), torch.float32)
        usual = search.by_maximum(exact, exact.abs().amax() / (nvfp4.MAX * nvfp4.SCALE_MAX))
        row[f"{name}_db"] = round(decibels(search.energy(exact), search.energy(got - exact)), 3)
        row[f"{name}_max_db"] = round(decibels(usual.signal, usual.error), 3)
        report(f"{name}: {row[f'{name}_db']:.2f} dB, the usual recipe {row[f'{name}_max_db']:.2f} dB")
    row["seconds_per_matrix"] = round(statistics.median(seconds), 4)
    report(f"{row['seconds_per_matrix']:.3f} s for a matrix of {ROWS * INPUTS / 1e6:.1f} M weights")
    row |= {"model": model.name} | _model(model, tokens, report)
    return row | {"rounds": rounds} | ledger.circumstances()


def _model(model: Path, tokens: int, report: Callable[[str], None]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for recipe in ("optimal", "max"):
        with tempfile.TemporaryDirectory(prefix="perilune-convert-") as scratch:
            result = Path(scratch) / recipe
            with Conversion(model, Target(to="nvfp4", recipe=recipe)) as conversion:
                conversion.run(result)
            seen = quality.measure(model, result, tokens=tokens, problems=0)
        report(f"{recipe}: KL {seen['kl_nats']:.3e} nats, top-1 agrees in {100 * seen['top1_agreement']:.2f} %")
        row |= {
            "tokens": seen["tokens"],
            f"{recipe}_sqnr_db": seen["sqnr_db"],
            f"{recipe}_kl_nats": round(seen["kl_nats"], 6),
            f"{recipe}_top1_agreement": round(seen["top1_agreement"], 5),
            f"{recipe}_layers_db": seen["layers_db"],
        }
    return row | {"kl_ratio": round(row["optimal_kl_nats"] / row["max_kl_nats"], 4)}


def _gaussian(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, INPUTS, generator=generator)


def _lognormal(generator: torch.Generator) -> Tensor:
    rows = torch.randn(ROWS, 1, generator=generator).mul(SPREAD).exp()
    columns = torch.randn(1, INPUTS, generator=generator).mul(SPREAD).exp()
    return _gaussian(generator) * rows * columns


def _student(generator: torch.Generator) -> Tensor:
    """With five degrees of freedom."""
    chi = sum(_gaussian(generator).square() for _ in range(5))
    assert isinstance(chi, Tensor)
    return _gaussian(generator) / (chi / 5).sqrt()


DISTRIBUTIONS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gaussian": _gaussian,
    "lognormal": _lognormal,
    "student5": _student,
}
