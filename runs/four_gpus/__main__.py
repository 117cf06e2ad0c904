"""Measures the whole model on four GPUs (or two, or eight); each figure has a prediction and a wanted value.

python -m runs.four_gpus --plan                              memory, parts, predictions; nothing is measured
python -m runs.four_gpus --ledger bench/results              everything, in the order of STARTS
python -m runs.four_gpus --part f,e --ledger bench/results   some parts: each start of an engine takes minutes
python -m runs.four_gpus --tp 2 --layers 27 --part h,f       what fits two GPUs
python -m runs.four_gpus --device cpu --tp 2                 the same on a shape for CPUs (or --model kimi-nano)

Parts that have rows of this commit in the ledger are left out, so that a run can be continued; --again measures them,
too. Each start of an engine has a process of its own. When its time is over, it prints its stacks and ends.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from perilune.bench import ledger
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError, PeriluneError
from perilune.engine import fit
from perilune.engine.engine import Engine
from perilune.engine.resolve import free_bytes
from perilune.ops.harness import build as ops_build
from perilune.plan import memory
from runs.four_gpus import over_http, steps
from runs.four_gpus.predictions import predictions
from runs.four_gpus.setting import CPU_SIZES, PARTS, START_SECONDS, STARTS, USUAL, WANTED, Setting

H200_FREE_BYTES = 147.0e9  # memory that one process can allocate
ENDING_SECONDS = 6.0  # time in which a start's processes may print their stacks before they are killed
CLOSE_SECONDS = 15.0  # an engine may take to close; then its process prints its stacks and ends
GENERIC = ("part", "figure", "measured", "predicted", "wanted", "met")

Row = dict[str, Any]


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by an exception, so that started processes are ended, too
    setting = Setting(args.tp, args.layers, args.model, args.device, args.kv_dtype, args.chunk, args.fp8_activations)
    if args.device == "cpu":
        setting = dataclasses.replace(setting, chunk=min(args.chunk, 512), sizes=CPU_SIZES)
    try:
        letters = _letters(args.part)
        expected = predictions(setting, ledger.DEFAULT)
        if args.plan:
            _show_plan(setting, letters, expected)
        elif args.start is not None:
            _measure(setting, args.start, letters, args, expected)
        elif not _all(setting, letters, args):
            sys.exit(1)
    except PeriluneError as e:
        sys.exit(f"error: {e}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m runs.four_gpus", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tp", type=int, default=4, help="GPUs, a rank on each")
    parser.add_argument("--layers", type=int, help="of the shape; default: all")
    parser.add_argument("--model", help="a checkpoint instead of random weights: acceptance is then measured")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="fp8")
    parser.add_argument("--chunk", type=int, default=10240, help="tokens of a prompt computed in one step")
    parser.add_argument("--fp8-activations", action="store_true", help="prompts multiply and attend in 8 bits")
    parser.add_argument("--part", default=",".join(USUAL), help=f"letters of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=590.0, help="for all of them together")
    parser.add_argument("--ledger", type=Path, help="directory of the rows; without one they are only printed")
    parser.add_argument("--again", action="store_true", help="measure what this commit has rows of")
    parser.add_argument("--plan", action="store_true", help="show memory, parts and predictions, and end")
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _letters(text: str) -> list[str]:
    letters = [letter.strip() for letter in text.split(",")]
    if wrong := [letter for letter in letters if letter not in PARTS]:
        raise ConfigError(f"--part {wrong[0]!r} is no part: give some of {', '.join(PARTS)}, separated by commas")
    return letters


def _show_plan(setting: Setting, letters: Sequence[str], expected: dict[str, float | str]) -> None:
    with setting.directory() as path:
        for start in [s for s in STARTS if any(PARTS[letter].start == s for letter in letters)]:
            config = build(EngineConfig, setting.engine(start))
            free = H200_FREE_BYTES if setting.device == "cuda" else free_bytes(torch.device("cpu")) / setting.tp
            plan = memory.plan(fit.demand(path, config, torch.device(setting.device)).demand, setting.tp, free)
            own = [PARTS[letter] for letter in letters if PARTS[letter].start == start]
            seconds = START_SECONDS + sum(part.seconds for part in own)
            print(f"start {start!r}, at most {seconds:.0f} s{'' if plan.fits else ': DOES NOT FIT'}")
            print("\n".join(f"  {line}" for line in plan.lines()))
            for part in own:
                print(f"  {part.letter}  {part.what}")
    for figure, value in expected.items():
        wanted = next((w for (_, name), (w, _) in WANTED.items() if name == figure), None)
        print(f"{figure:<28} predicted {value}" + (f", wanted {wanted:g}" if wanted and setting.whole else ""))


def _all(setting: Setting, letters: Sequence[str], args: argparse.Namespace) -> bool:
    """Runs each start in a process of its own; returns whether all parts were measured."""
    if setting.device == "cuda" and (there := torch.cuda.device_count()) < setting.tp:
        raise ConfigError(
            f"{setting.tp} GPUs are needed and {there} are here: give --tp, --device cpu, or --plan alone"
        )
    ends = time.monotonic() + args.seconds
    here = [] if args.again or args.ledger is None else _measured(setting, args.ledger)
    left = [letter for letter in letters if letter not in here]
    if setting.device == "cuda" and left:  # now, so that building kernels does not use up the first start's time
        with ThreadPoolExecutor() as pool:
            failed = [built for built in pool.map(ops_build.library, ops_build.sources()) if isinstance(built, str)]
        print(f"kernels built after {time.monotonic() - ends + args.seconds:.1f} s", *failed, sep="\n", flush=True)
    if skipped := [letter for letter in letters if letter in here]:
        print(f"rows of this commit are there: {', '.join(skipped)} (--again measures them anew)")
    missing: list[str] = []
    for start in STARTS:
        own = [letter for letter in left if PARTS[letter].start == start]
        most = min(START_SECONDS + sum(PARTS[n].seconds for n in own), ends - time.monotonic() - ENDING_SECONDS)
        if not own:
            continue
        if most < ENDING_SECONDS:
            print(f"no time left for {', '.join(own)}")
            missing += own
            continue
        command = [sys.executable, "-m", "runs.four_gpus", *_without_parts(sys.argv[1:])]
        command += ["--start", start, "--part", ",".join(own)]
        missing += own if _run(command, most) else []
    if missing:
        print(f"not measured, or not whole: {', '.join(missing)}")
    return not missing


def _run(command: Sequence[str], seconds: float) -> int:
    """Runs a command; returns its exit status. After `seconds` its processes print their stacks. When this returns, all
    its processes have ended, servers and ranks included."""
    process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"PYTHONFAULTHANDLER": "1"})
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:.0f} s, where:", flush=True)
        os.killpg(process.pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        return 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _without_parts(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in arguments:
        if not skip and word.partition("=")[0] not in ("--part", "--seconds"):
            kept.append(word)
        skip = word in ("--part", "--seconds")
    return kept


def _measured(setting: Setting, directory: Path) -> list[str]:
    """Letters of parts with a row of this commit and setting in the ledger; none for a checkpoint."""
    if setting.shape is None or (commit := ledger.circumstances()["commit"]) is None:
        return []
    wanted = {"run": "four-gpus", "commit": commit, "tp": setting.tp, "shape": setting.shape, "layers": setting.depth}
    lines = [line for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    found = [row for row in map(json.loads, lines) if wanted.items() <= row.items()]
    return [row["part"] for row in found if row.get("fp8_activations", False) == setting.fp8_activations]


def _measure(
    setting: Setting, start: str, letters: list[str], args: argparse.Namespace, expected: dict[str, float | str]
) -> None:
    """The parts of one start, in this process."""
    kept = list[Row]()

    def keep(row: Row) -> None:
        row = _with_targets(setting, row, expected)
        kept.append(row)
        print(json.dumps(row), flush=True)
        if args.ledger is not None:
            ledger.append([row], args.ledger)

    with setting.directory() as path:
        if start in ("served", "plain"):
            asyncio.run(_over_http(path, setting, start, letters, keep))
        else:
            _in_process(path, setting, start, letters, keep)
    for row in kept:
        print("  ".join(f"{key} {row[key]}" for key in GENERIC if row.get(key) is not None))


async def _over_http(path: Path, setting: Setting, start: str, letters: list[str], keep: Any) -> None:
    async with contextlib.aclosing(over_http.rows(path, setting, start, "".join(letters))) as found:
        async for row in found:
            keep(row)


def _in_process(path: Path, setting: Setting, start: str, letters: list[str], keep: Any) -> None:
    begin = time.perf_counter()
    engine = Engine(path, build(EngineConfig, setting.engine(start)), progress=True)
    gc.collect()
    gc.freeze()  # as a server does: a full collection that walks all objects takes about 80 ms
    started = round(time.perf_counter() - begin, 1)
    print(f"start {start!r}: {started} s, exchange {engine.runner.group.name}")
    print(*(f"kv_blocks {n}: {why}" for key, n, why in engine.info.choices if key == "kv_blocks"), flush=True)
    failed = []
    try:
        for letter in letters:
            try:
                for row in steps.rows(engine, setting, letter):
                    keep(row | {"start_s": started})
            except PeriluneError as e:
                print(f"part {letter} failed: {e}", flush=True)
                failed.append(letter)
                if engine.busy:  # its requests would disturb the next measurement
                    break
    finally:
        # All rows are written by now. A close that waits for a lost rank must not take the time of other starts.
        aborting = threading.Timer(CLOSE_SECONDS, os.abort)
        aborting.start()
        engine.close()
        aborting.cancel()
    if failed:
        raise ConfigError(f"part {', '.join(failed)} failed: see above")


def _with_targets(setting: Setting, row: Row, expected: dict[str, float | str]) -> Row:
    """The row with the predicted and the wanted value of its figure, if there are such."""
    value = expected.get(row["figure"])
    row |= {"predicted": value if isinstance(value, float) else None}
    if setting.whole and (found := WANTED.get((row["part"], row["figure"]))) and row["measured"] is not None:
        wanted, more = found
        row |= {"wanted": wanted, "met": row["measured"] >= wanted if more else row["measured"] <= wanted}
    return row


if __name__ == "__main__":
    main()
