"""Does mining help kimi-nano's drafter? Ways to go on training one draft, all with the same number of taught tokens:

    mixture  fresh answers to fresh problems, as they come
    mined    fewer of these, and windows where the draft lost tokens, of answers that `mixture` does not get
    domains  fewer of these, and whole answers at random, with each family's share as in `mined`

by several seeds, compared on held-out problems. Several processes share one GPU: python -m runs.kimi_nano.mining --help

What is heavy is imported where it is used: each process that makes prompts begins by importing this file.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runs.kimi_nano.mining_setting import BASE, LENGTH, WAYS, Job, Measured, Mining


def run(args: argparse.Namespace, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each number of steps to begin with and each way to mine."""
    from perilune.bench import ledger
    from runs.kimi_nano import mining_jobs as jobs
    from runs.kimi_nano.mining_table import compare

    out, answers = args.out, args.answers or args.out
    fresh = args.rows or (max(args.begin) + args.steps) * args.chains // 55
    minings = [Mining(*some) for some in itertools.product(args.share, args.focus, args.balance)]
    todo = {
        (b, seed): Job(answers, out, args.device, seed, b, args.steps, args.chains, args.rate)
        for b in args.begin
        for seed in args.seeds
    }
    with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        held_out = pool.submit(jobs.hold_out, out, args.count, args.held_out_seed, args.device)
        made = [
            pool.submit(jobs.answer, answers / "fresh", jobs.FRESH, fresh, args.device),
            pool.submit(jobs.answer, answers / "mine", jobs.MINED, args.mine_rows or fresh, args.device),
        ]
        for _ in range(args.processes - len(made) - 1):
            pool.submit(jobs.warm, args.device)
        for future in made:
            future.result()
        tell("answers to learn from")
        begun = {pool.submit(jobs.begin, job, minings): key for key, job in todo.items()}
        held_out.result()
        held = jobs.apart(answers, out)
        tell(f"answers to {held} held-out prompts")
        mined: dict[tuple[int, int], list[list[dict[str, Any]]]] = {}
        queued: dict[tuple[tuple[int, int], Mining | None, str], Future[Measured]] = {}
        for done in as_completed(begun):
            key = begun[done]
            mined[key], job = done.result(), todo[key]
            for m, way in itertools.product(minings, args.ways):
                queued[key, m, way] = pool.submit(jobs.go_on, job, job.way(way, m))
            queued[key, None, BASE] = pool.submit(jobs.go_on, job, None)
            queued[key, None, "start"] = pool.submit(jobs.measure, job, job.directory / "start")
        tell("drafts to begin with, and their windows")
        measured = {at: future.result() for at, future in queued.items()}
        tell("trained and measured")
    names, families = jobs.families(out)
    rows = []
    for b, (number, m) in itertools.product(args.begin, enumerate(minings)):
        by_seed = [
            {
                "start": measured[(b, seed), None, "start"],
                BASE: measured[(b, seed), None, BASE],
                **{way: measured[(b, seed), m, way] for way in args.ways},
            }
            for seed in args.seeds
        ]
        rows.append(
            {
                "bench": "mining", "model": "kimi-nano", "begin_steps": b, "steps": args.steps, "chains": args.chains,
                "rate": args.rate, **asdict(m), "seeds": args.seeds, "length": LENGTH, "held_out": held,
                "held_out_seed": args.held_out_seed, "fresh_rows": fresh, "mine_rows": args.mine_rows or fresh,
                "domains": mined[b, args.seeds[0]][number], "results": compare(by_seed, families, names),
                **ledger.circumstances(),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new directory for corpora and drafts")
    parser.add_argument("--answers", type=Path, help="directory of the answers, if it is another: not collected again")
    parser.add_argument("--begin", type=int, nargs="+", default=[0], help="steps before; 0: the bundled draft")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--chains", type=int, default=8192, help="taught in a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--share", type=float, nargs="+", default=[0.5], help="of the mined windows")
    parser.add_argument("--focus", type=float, nargs="+", default=[2.0])
    parser.add_argument("--balance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help=f"besides {BASE}")
    parser.add_argument("--rows", type=int, default=0, help="fresh answers; default: as many as are taught")
    parser.add_argument("--mine-rows", type=int, default=0, help="answers to mine from; default: as many")
    parser.add_argument("--count", type=int, default=128, help="held-out problems per family")
    parser.add_argument("--held-out-seed", type=int, default=1, help="which of them")
    parser.add_argument("--processes", type=int, default=4, help="at once; a training takes up to 28 GB of the GPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--ledger", type=Path, help="append to mining.jsonl in this directory")
    args = parser.parse_args()
    began = time.monotonic()
    from rich.console import Console

    from perilune.bench import ledger
    from runs.kimi_nano.mining_table import table

    rows = run(args, lambda what: print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True))
    for row in rows:
        Console(width=140).print(table(row))
    if args.ledger is not None:
        ledger.append(rows, args.ledger)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
