"""Does mining help kimi-nano's drafter? Ways to go on training one draft, all with the same number of taught tokens:

    mixture  fresh answers to fresh problems, as they come
    mined    fewer of these, and windows where the draft lost tokens, of answers that `mixture` does not get
    domains  fewer of these, and whole answers at random, with each family's share as in `mined`

by several seeds, compared on held-out problems; settings and expectations are in mining_setting.py. Several processes
share each GPU. Repeat a command that was cut short: what was done is not done again.

Heavy modules are imported inside functions, because each process that makes prompts imports this file.
"""

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from runs.kimi_nano.mining_setting import (
    BASE,
    LENGTH,
    SETTINGS,
    WAYS,
    Job,
    Measured,
    Mining,
    Setting,
    parts,
    take_card,
)

START = "start"
T = TypeVar("T")


def run(args: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """For each setting, a row for each way to mine, over the seeds that are complete."""
    from runs.kimi_nano import mining_jobs as jobs

    context = multiprocessing.get_context("spawn")
    start = (take_card, (context.Value("i", 0), args.cards)) if args.cards > 1 else (None, ())
    settings = [_setting(args, name) for name in args.settings]
    minings = [Mining(share, guard=args.guard) for share in args.share]
    with ProcessPoolExecutor(args.processes, context, *start) as pool:

        def collect(setting: Setting) -> list[Future[None]]:
            # The largest parts first, so that none runs alone at the end.
            asked = sorted(parts(setting, args.out, args.chains), key=lambda part: -part.rows)
            return [pool.submit(jobs.answer, part, args.device) for part in asked]

        held_out = pool.submit(jobs.hold_out, args.out, args.count, args.held_out_seed, args.device)
        answered = {settings[0]: collect(settings[0])}
        held_out.result()
        for number, setting in enumerate(settings):
            for future in answered[setting]:
                future.result()
            tell(f"{setting.name}: answers")
            todo = [Job(setting, args.out, args.device, seed, args.chains, args.rate) for seed in args.seeds]
            begun = {pool.submit(jobs.begin, job, minings): job for job in todo}
            for following in settings[number + 1 : number + 2]:  # beside the trainings
                answered[following] = collect(following)
            held = jobs.apart(args.out, parts(setting, args.out, args.chains))
            tell(f"{held} held-out prompts, none of them learnt from")
            queued: dict[Future[Measured], tuple[Job, str]] = {}
            summaries: dict[Job, dict[str, Any]] = {}
            for done in as_completed(begun):
                job = begun[done]
                if (summary := _result(done, f"{job.directory}", tell)) is None:
                    continue
                summaries[job] = summary
                queued[pool.submit(jobs.go_on, job, None)] = job, BASE
                for windows, m in ((job.way(way, m), m) for way in args.ways for m in minings):
                    queued[pool.submit(jobs.go_on, job, windows, m.share)] = job, windows.name
                queued[pool.submit(jobs.measure, job, job.directory / START)] = job, START
                tell(f"{job.directory.name} begun and mined")
            measured: dict[tuple[Job, str], Measured] = {}
            for trained in as_completed(queued):
                job, name = queued[trained]
                if (found := _result(trained, f"{job.directory} {name}", tell)) is not None:
                    measured[job, name] = found
                    tell(f"{job.directory.name} {name}")
            rows = [_row(args, setting, m, todo, summaries, measured, held) for m in minings]
            yield [row for row in rows if row is not None]


def _setting(args: argparse.Namespace, name: str) -> Setting:
    """The declared setting with the command line's changes."""
    found = SETTINGS[name]
    if args.steps:
        found = replace(found, steps=args.steps, begin=args.steps if found.begin else 0)
    return replace(found, mine=args.mine) if args.mine else found


def _result(future: Future[T], what: str, tell: Callable[[str], None]) -> T | None:
    """The result, or None if the job failed, so that hours of the other seeds are not lost."""
    try:
        return future.result()
    except Exception:  # of any kind: out of GPU memory, a killed process
        tell(f"{what} failed:\n{traceback.format_exc()}")
        return None


def _row(
    args: argparse.Namespace,
    setting: Setting,
    mining: Mining,
    own: list[Job],
    summaries: dict[Job, dict[str, Any]],
    measured: dict[tuple[Job, str], Measured],
    held: int,
) -> dict[str, Any] | None:
    """The ledger row; None if no seed is complete."""
    from perilune.bench import ledger
    from runs.kimi_nano import mining_jobs as jobs
    from runs.kimi_nano.mining_table import compare

    names = {START: START, BASE: BASE, **{way: f"{way}-{mining.share:g}" for way in args.ways}}
    whole = [job for job in own if all((job, name) in measured for name in names.values())]
    if not whole:
        return None
    by_seed = [{way: measured[job, name] for way, name in names.items()} for job in whole]
    families, family = jobs.families(args.out)
    return {
        "bench": "mining", "model": "kimi-nano", "setting": setting.name, "weights": dict(setting.weights),
        "begin_steps": setting.begin, "steps": setting.steps, "chains": args.chains, "rate": args.rate,
        **asdict(mining), "seeds": [job.seed for job in whole], "length": LENGTH, "temperature": 0, "held_out": held,
        "held_out_seed": args.held_out_seed, "domains": summaries[whole[0]][f"{mining.share:g}"],
        "answers": jobs.totals(parts(setting, args.out, args.chains)), "results": compare(by_seed, family, families),
        **ledger.circumstances(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a directory for answers, drafts and what they reach")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--steps", type=int, help="instead of the declared ones, before too")
    parser.add_argument("--mine", type=int, help="answers to mine from, instead of as many as declared")
    parser.add_argument("--chains", type=int, default=4096, help="taught in a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--share", type=float, nargs="+", default=[0.3, 0.6], help="of the mined windows")
    parser.add_argument("--guard", type=float, default=0.5, help="of the windows, by the text whatever is lost")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help=f"besides {BASE}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--count", type=int, default=192, help="held-out problems per family")
    parser.add_argument("--held-out-seed", type=int, default=1, help="which of them")
    parser.add_argument("--processes", type=int, default=4, help="at once; a training takes up to 15 GB of its GPU")
    parser.add_argument("--cards", type=int, default=1, help="GPUs that they share")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--ledger", type=Path, help="append to mining.jsonl in this directory")
    args = parser.parse_args()
    began = time.monotonic()
    from rich.console import Console

    from perilune.bench import ledger
    from runs.kimi_nano.mining_table import table

    def tell(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    for rows in run(args, tell):
        for row in rows:
            Console(width=140).print(table(row))
        if rows and args.ledger is not None:
            ledger.append(rows, args.ledger)
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
