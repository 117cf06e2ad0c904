"""`perilune ops`: list the operations; check one against its reference on every case, then time it."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click
import torch

from perilune.cli.shared.options import device_option, require_effect
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.engine.resolve import Choices, resolve_device
from perilune.ops.harness import build, check, registry, timing, workspace
from perilune.ops.harness.case import Make
from perilune.ops.harness.registry import REFERENCE, Op

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@click.command("ops")
@click.argument("name", required=False)
@click.option("--impl", "impls", multiple=True, help="only this implementation; may be repeated")
@click.option("--case", "pattern", help="only cases with this in their text, e.g. 'T=1,'")
@click.option("--dtype", type=click.Choice([*DTYPES, "all"]), default="all", help="type of activations")
@device_option
@click.option("--check-only", is_flag=True, help="do not time")
@click.option("--json", "as_json", is_flag=True, help="print one JSON document instead of tables")
@click.option("--build", is_flag=True, help="compile every kernel source for which a compiler is here, and stop")
def command(
    name: str | None,
    impls: tuple[str, ...],
    pattern: str | None,
    dtype: str,
    device: str,
    check_only: bool,
    as_json: bool,
    build: bool,
) -> None:
    """List the operations, or check and time operation NAME.

    Every implementation of NAME that runs here is compared with the reference on every case; then the same cases are
    timed, with the fraction of what this machine's memory and arithmetic allow. A failed check ends with exit code 1.
    """
    if build:
        require_effect(("name impls pattern dtype device check_only as_json", False, "with --build"))
        _build()
        return
    where = resolve_device(EngineConfig(device=device), Choices([]))
    ops = registry.all_ops()
    if name is None:
        if impls or pattern or check_only or dtype != "all":
            raise click.UsageError("--impl, --case, --dtype and --check-only need an operation NAME")
        _list(ops, where, as_json)
        return
    if name not in ops:
        raise ConfigError(f"unknown op {name!r}; known: {', '.join(ops)}")
    op = ops[name]
    for impl in impls:
        registry.check_overrides({name: impl})
    dtypes = [t for t in op.dtypes if dtype == "all" or t == DTYPES[dtype]]
    if not check.cases(op, where, pattern) or not dtypes:
        raise ConfigError(f"op {name} has no case of type {dtype} on {where} that contains {pattern or ''!r}")
    names = impls or tuple(c.name for c in op.candidates)
    with workspace.owned():
        checks = _check(op, where, dtypes, pattern, names, as_json)
        failed = sum(row["failed"] is not None for row in checks)
        ran = {row["impl"] for row in checks if row["refused"] is None}
        unchecked = [impl for impl in dict.fromkeys(impls) if impl not in {*ran, REFERENCE}]
        times = [] if check_only or failed else _time(op, where, dtypes, pattern, names, as_json)
    if as_json:
        click.echo(json.dumps({"op": name, "device": _describe(where), "checks": checks, "times": times}))
    for impl in unchecked:
        reason = next(row["refused"] for row in checks if row["impl"] == impl)
        click.echo(f"{name}: no case of {impl} was checked: {reason}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _build() -> None:
    """Compiles all kernel sources now instead of on first use. Names and skips those without a compiler."""
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, built in zip(build.sources(), pool.map(build.library, build.sources())):
            missing = isinstance(built, str) and built.startswith(build.NO_COMPILER)
            failed += isinstance(built, str) and not missing
            click.echo(f"{name}: {built if isinstance(built, str) else 'ready'}")
    if failed:
        raise click.exceptions.Exit(1)


def _describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {"type": "cpu", "threads": torch.get_num_threads(), "torch": torch.__version__}


def _list(ops: dict[str, Op[..., Any]], device: torch.device, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name, op in ops.items():
        chosen: dict[str, int] = {}
        refused: dict[str, dict[str, None]] = {}
        for case in (c for c in op.cases if not c.big):
            for dtype in op.dtypes:
                args = list(op.inputs(case, Make(dtype, device, check.SEED)).values())
                best, reasons = op.explain(args)
                assert best is not None, f"the reference of {name} always runs"
                chosen[best.name] = chosen.get(best.name, 0) + 1
                for other, reason in reasons.items():
                    refused.setdefault(other, {})[reason] = None
        impls = [c.name for c in op.candidates]
        listed = {impl: list(reasons) for impl, reasons in refused.items()}
        rows.append({"op": name, "implementations": impls, "chosen": chosen, "refused": listed})
    if as_json:
        click.echo(json.dumps({"device": _describe(device), "ops": rows}))
        return
    click.echo(f"{'op':14s} {'implementations':24s} {'chosen here (cases)':24s} refused")
    for row in rows:
        counts = ", ".join(f"{impl} {count}" for impl, count in row["chosen"].items())
        why = "; ".join(f"{impl}: {reason}" for impl, reasons in row["refused"].items() for reason in reasons)
        click.echo(f"{row['op']:14s} {', '.join(row['implementations']):24s} {counts:24s} {why}".rstrip())


def _check(
    op: Op[..., Any],
    device: torch.device,
    dtypes: list[torch.dtype],
    pattern: str | None,
    names: tuple[str, ...],
    quiet: bool,
) -> list[dict[str, Any]]:
    rows = []
    for case in check.cases(op, device, pattern):
        for dtype in dtypes:
            for result in check.check(op, case, dtype, device, names):
                row = {"case": repr(case), "dtype": check.short(dtype), **vars(result)}
                rows.append(row)
                if result.failed and not quiet:
                    click.echo(f"FAILED {result.impl} {row['dtype']} {case}: {result.failed}")
    ran = [r for r in rows if r["refused"] is None]
    failed = sum(r["failed"] is not None for r in ran)
    if not quiet:
        click.echo(f"{op.name}: {len(ran) - failed} checks passed, {failed} failed, {len(rows) - len(ran)} refused")
    return rows


def _time(
    op: Op[..., Any],
    device: torch.device,
    dtypes: list[torch.dtype],
    pattern: str | None,
    names: tuple[str, ...],
    quiet: bool,
) -> list[dict[str, Any]]:
    rows = []
    ratios: dict[str, list[float]] = {}
    for dtype in dtypes:
        roof = timing.measure_roof(device, dtype)
        if not quiet:
            click.echo(
                f"\n{check.short(dtype)}; roof: {roof.bandwidth / 1e9:.1f} GB/s, {roof.flop_rate / 1e9:.0f} GFLOP/s"
            )
            click.echo(f"{'us':>11s} {'GB/s':>8s} {'GFLOP/s':>9s} {'% roof':>7s} {'x ref':>7s}  implementation, case")
        for case in check.cases(op, device, pattern):
            timed = timing.measure(op, case, dtype, device, (*names, REFERENCE), roof)
            slow = next(t.seconds for t in timed if t.impl == REFERENCE)
            for t in timed:
                if t.impl not in names:
                    continue
                row = {
                    "case": repr(case),
                    "dtype": check.short(dtype),
                    "impl": t.impl,
                    "us": t.seconds * 1e6,
                    "GB/s": t.cost.bytes / t.seconds / 1e9,
                    "GFLOP/s": t.cost.flops / t.seconds / 1e9,
                    "of_roof": t.of_roof,
                    "x_reference": slow / t.seconds,
                }
                rows.append(row)
                ratios.setdefault(t.impl, []).append(slow / t.seconds)
                if not quiet:
                    click.echo(
                        f"{row['us']:11.1f} {row['GB/s']:8.1f} {row['GFLOP/s']:9.1f} {100 * t.of_roof:7.1f} "
                        f"{slow / t.seconds:7.2f}  {t.impl:10s} {case}"
                    )
    if not quiet:
        for impl, values in ratios.items():
            click.echo(f"{impl}: {timing.geometric_mean(values):.2f} x reference (geometric mean of {len(values)})")
    return rows
