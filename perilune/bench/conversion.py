"""INT4 to NVFP4: error, speed and effect on a model, beside the usual recipe.

Weights of one expert's matrix of Kimi K2 are sampled from three distributions and quantised to INT4 as in its training
(max|w| / 7 in groups of 32). The error is that of the NVFP4 weights against these INT4 weights.
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
from perilune.convert.calibrate import measure as measure_inputs
from perilune.convert.stream import Conversion, decibels
from perilune.convert.target import Target
from perilune.convert.texts import gather
from perilune.formats import int4, nvfp4

ROWS, INPUTS = 2048, 7168
RESAMPLES = 2000
CALIBRATION_TOKENS = 8192
TARGETS = {
    "optimal": Target(to="nvfp4"),
    "calibrated": Target(to="nvfp4", calibrated=True),
    "max": Target(to="nvfp4", recipe="max"),
}
SPREAD = 0.5  # standard deviation of the logarithm of rows' and columns' sizes in "lognormal"


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
    """KL divergence of three NVFP4 conversions on the same texts; ratios of `optimal` and `calibrated` to `max`."""
    texts, device = gather(model, tokens), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row: dict[str, Any] = {"tokens": texts.tokens, "sequences": len(texts.sequences)}
    divergences = {}
    for name, target in TARGETS.items():
        with tempfile.TemporaryDirectory(prefix="perilune-convert-") as scratch:
            result = Path(scratch) / name
            inputs = None
            if target.calibrated:
                inputs = measure_inputs(model, gather(model, CALIBRATION_TOKENS, split="train"), device).inputs()
            with Conversion(model, target) as conversion:
                conversion.run(result, inputs=inputs)
            weights = quality.compare_weights(model, result)
            changed = {layer for layer, *_ in weights.losses}
            seen = quality.compare_outputs(model, result, texts, device, changed, torch.float32)
        nats, agreement = seen.divergence.mean().item(), seen.agreed.double().mean().item()
        report(f"{name}: KL {nats:.3e} nats, top-1 agrees in {100 * agreement:.2f} %")
        row |= {
            f"{name}_sqnr_db": round(weights.sqnr_db, 4),
            f"{name}_kl_nats": round(nats, 6),
            f"{name}_top1_agreement": round(agreement, 5),
            f"{name}_layers_db": [round(min(decibels(s, e), 999.0), 4) for s, e in seen.layers],
        }
        pieces = torch.split(seen.divergence, [len(ids) for ids in texts.sequences])
        divergences[name] = torch.stack([piece.sum() for piece in pieces])
    for key, name in (("kl_ratio", "optimal"), ("kl_ratio_calibrated", "calibrated")):
        low, high = interval(divergences[name], divergences["max"])
        ratio = (divergences[name].sum() / divergences["max"].sum()).item()
        report(
            f"{name}: {ratio:.4f} of the usual recipe's KL, 95 % of resampled texts between {low:.4f} and {high:.4f}"
        )
        row |= {key: round(ratio, 4), f"{key}_95": [round(low, 4), round(high, 4)]}
    return row


def interval(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The bootstrap 95 % interval, over texts, of the ratio of two sums over the same texts."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(one), (RESAMPLES, len(one)), generator=generator)
    ratios = (one[drawn].sum(1) / other[drawn].sum(1)).sort().values
    return ratios[int(0.025 * RESAMPLES)].item(), ratios[int(0.975 * RESAMPLES)].item()


def _gaussian(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, INPUTS, generator=generator)


def _lognormal(generator: torch.Generator) -> Tensor:
    rows = torch.randn(ROWS, 1, generator=generator).mul(SPREAD).exp()
    columns = torch.randn(1, INPUTS, generator=generator).mul(SPREAD).exp()
    return _gaussian(generator) * rows * columns


def _student(generator: torch.Generator) -> Tensor:
    """Student's t with five degrees of freedom."""
    chi = sum(_gaussian(generator).square() for _ in range(5))
    assert isinstance(chi, Tensor)
    return _gaussian(generator) / (chi / 5).sqrt()


DISTRIBUTIONS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gaussian": _gaussian,
    "lognormal": _lognormal,
    "student5": _student,
}
