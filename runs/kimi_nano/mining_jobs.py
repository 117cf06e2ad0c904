"""What runs/kimi_nano/mining.py does in each of its processes: answers, training, windows, measuring."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from perilune.draft import report
from perilune.draft.capture import Capture
from perilune.draft.collect import Forced, Plan, about, collect
from perilune.draft.corpus import Corpus, Row
from perilune.draft.evaluate import walk
from perilune.draft.export import config_for, export
from perilune.draft.mine import Domain, Rule, Scored, Window, mine
from perilune.draft.mine_score import reopen, score
from perilune.draft.prompts import Problems
from perilune.draft.train import Options, train
from perilune.engine.llm import LLM
from perilune.formats.jsonfile import write_object
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.eagle3_load import read_tensors
from perilune.model.hub import resolve_model
from perilune.model.kimi_k2 import KimiK2
from perilune.model.load import load
from perilune.spec.eagle3 import load_drafter
from runs.kimi_nano.mining_setting import BASE, LENGTH, Job, Measured, Mining

FRESH, MINED = 101, 102  # seeds of the problems that are trained on and that are mined: different ones
AUX, WIDTH, RATE = (1, 3, 4), 448, 2e-3  # of a draft from nothing, as the bundled one
CAPTURED = 65536


@lru_cache(maxsize=1)
def target(device: str) -> tuple[Path, KimiK2]:
    path = resolve_model("kimi-nano")
    config, weights = load(path, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    return path, KimiK2(config, weights, max_positions=config.max_position_embeddings)


def warm(device: str) -> None:
    """Loads the target in a process that will be needed."""
    target(device)


def answer(out: Path, seed: int, rows: int, device: str) -> None:
    """The target's own greedy answers to `rows` problems of the training mixture."""
    path, model = target(device)
    source = Problems(path, seed)
    plan = Plan(rows, 8192, 1024, seed, workers=min(7, (os.cpu_count() or 1) // 2), forced=True)
    collect(Forced(Capture(model, (), tokens=CAPTURED), plan), source, plan, Corpus(out, about(source, plan, path)))


def hold_out(out: Path, count: int, seed: int, device: str) -> None:
    """The target's answers to held-out problems, at each temperature."""
    with LLM(target(device)[0], device=device, draft="off", max_num_seqs=256) as llm:
        rows = report.answers(llm, count, seed=seed, max_tokens=512)
    for temperature, some in rows.items():
        Corpus(out / f"heldout-{temperature:g}", {"families": report.evaluated()}).add(some)


def options(job: Job, steps: int, rate: float, share: float = 0.5) -> Options:
    return Options(
        steps=steps, chains=job.chains, rate=rate, seed=job.seed, keep_gb=2.0, window_share=share, save_every=1e9
    )


def begin(job: Job, minings: Sequence[Mining]) -> list[list[dict[str, Any]]]:
    """The draft that every way begins with, and what is mined with it; returns the summaries by domain."""
    path, model = target(job.device)
    draft = job.directory / "start"
    if not job.begin:
        draft.parent.mkdir(parents=True)
        draft.symlink_to(path / "drafter")
    else:
        raw = config_for(model.config, aux_ids=AUX, intermediate_size=WIDTH)
        trainee = train(
            model,
            Eagle3Config.from_dict(raw),
            [Corpus(job.answers / "fresh")],
            job.directory / "run",
            options(job, job.begin, RATE),
        )
        export(draft, raw, trainee.checkpoint())
    trainee = reopen(draft, model)
    capture = Capture(model, trainee.config.aux_layers(model.config.num_hidden_layers), tokens=CAPTURED)
    pool = Corpus(job.answers / "mine")
    rows = pool.rows()
    found = [Scored(r, lost, r.family) for r, lost in zip(rows, score(trainee, capture, rows, LENGTH)) if lost]
    summaries = []
    for m in minings:
        tokens = round(m.share * job.steps * job.chains)
        windows, domains = mine(found, pool.families, Rule(tokens, focus=m.focus, balance=m.balance, seed=job.seed))
        about = {"families": pool.families, "source": "mined"}
        Corpus(job.way("mined", m), about).add([w.row for w in windows])
        Corpus(job.way("domains", m), about).add(whole(rows, domains, tokens, job.seed))
        summaries.append(
            [
                {"name": d.name, "lost_per_chain": round(d.rate, 4), "share": round(d.share, 4), "windows": d.kept,
                 "taught": d.taught, "weight": round(d.weight, 3)}
                for d in domains
            ]
        )  # fmt: skip
    return summaries


def whole(rows: Sequence[Row], domains: Sequence[Domain], tokens: int, seed: int) -> list[Row]:
    """Answers at random with the domains' shares of `tokens`; the few of a rare domain weigh more."""
    chosen: list[Row] = []
    for number, domain in enumerate(domains):
        pool = [Window(row, 1.0) for row in rows if row.family == number]
        Random(f"{seed}:{number}").shuffle(pool)
        wanted, taught, own = domain.share * tokens, 0, []
        while pool and taught < wanted:
            own.append(pool.pop())
            taught += own[-1].taught
        chosen += [replace(w.row, weight=min(wanted / taught, 4.0)) for w in own]
    return chosen


def go_on(job: Job, windows: Path | None) -> Measured:
    """Goes on with windows, or without any, and measures what came of it."""
    _, model = target(job.device)
    start = job.directory / "start"
    name = BASE if windows is None else windows.name
    share = 0.5 if windows is None else float(name.split("-")[1])
    trainee = train(
        model,
        Eagle3Config.from_directory(start),
        [Corpus(job.answers / "fresh")],
        job.directory / f"{name}-run",
        options(job, job.steps, job.rate, share),
        windows=[] if windows is None else [Corpus(windows)],
        start=read_tensors(start),
    )
    draft = job.directory / f"{name}-draft"
    export(draft, json.loads((start / "config.json").read_text()), trainee.checkpoint())
    return measure(job, draft)


def measure(job: Job, draft: Path) -> Measured:
    _, model = target(job.device)
    norm = model.weights.norm
    drafter = load_drafter(draft, model.config, model.weights, dtype=norm.dtype, device=norm.device)
    capture = Capture(model, drafter.aux_layers, tokens=CAPTURED)
    measured: Measured = {}
    for corpus in sorted(job.out.glob("heldout-*")):
        tallies = walk(drafter, capture, Corpus(corpus).rows(), LENGTH, at_once=256)
        measured[corpus.name.removeprefix("heldout-")] = [(t.tokens, t.cycles) for t in tallies]
        # Also for whoever reads the directory of a run that was cut short.
        write_object(draft.with_name(f"{draft.name}.json"), measured)
    return measured


def apart(answers: Path, out: Path) -> int:
    """How many prompts are held out; none of them may be among those learnt from."""

    def prompts(corpus: Path) -> set[tuple[int, ...]]:
        return {row.ids[: row.given] for row in Corpus(corpus).rows()}

    held = prompts(out / "heldout-0")
    assert not held & (prompts(answers / "fresh") | prompts(answers / "mine")), "held-out prompts were learnt from"
    return len(held)


def families(out: Path) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """Names, and by temperature whose each held-out text is."""
    found = {t.name.removeprefix("heldout-"): [r.family for r in Corpus(t).rows()] for t in out.glob("heldout-*")}
    return report.evaluated(), found
