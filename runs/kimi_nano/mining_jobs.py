"""What runs/kimi_nano/mining.py does in each of its processes: answers, training, windows, measuring. Results are kept
in files, so that nothing is done twice."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from perilune.core.jsonfile import read_object, write_object
from perilune.core.sampling import SamplingParams
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
from perilune.formats.hub import resolve_model
from perilune.loading.eagle3 import read_tensors
from perilune.loading.load import load
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2
from perilune.speculation.eagle3 import load_drafter
from runs.kimi_nano.mining_setting import BASE, LENGTH, WAYS, Job, Measured, Mining, Part

AUX, WIDTH, RATE = (1, 3, 4), 448, 2e-3  # of a draft trained from scratch, like the bundled one
CAPTURED = 65536
HELD_OUT, SUMMARY = "heldout", "mined.json"


@lru_cache(maxsize=1)
def target(device: str) -> tuple[Path, KimiK2]:
    path = resolve_model("kimi-nano")
    config, weights = load(path, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    return path, KimiK2(config, weights, max_positions=config.max_position_embeddings)


def answer(part: Part, device: str) -> None:
    """The target's own greedy answers to problems as the traffic has them."""
    path, model = target(device)
    source = Problems(path, part.seed, part.weights)
    plan = Plan(part.rows, part.rows, 1024, part.seed, workers=0, forced=True)
    collect(
        Forced(Capture(model, (), tokens=CAPTURED), plan),
        source,
        plan,
        Corpus(part.directory, about(source, plan, path)),
    )


def hold_out(out: Path, count: int, seed: int, device: str) -> None:
    """The target's greedy answers to held-out problems, as many of each family."""
    if Corpus(out / HELD_OUT, {"families": report.evaluated()}).shards:
        return
    # kv_blocks, because by default the cache would take memory that other processes need.
    with LLM(target(device)[0], device=device, draft="off", max_num_seqs=256, kv_blocks=4096) as llm:
        asked = report.prompts(llm, count, seed=seed)
        answers = llm.generate([ids for ids, _ in asked], SamplingParams(temperature=0.0, max_tokens=512))
    Corpus(out / HELD_OUT).add(
        [
            Row(ids + a.token_ids, len(ids), family, True)
            for (ids, family), a in zip(asked, answers)
            if len(a.token_ids) > 1
        ]
    )


def options(job: Job, steps: int, rate: float, share: float = 0.5, keep_gb: float = 0.0) -> Options:
    return Options(
        steps=steps, chains=job.chains, rate=rate, seed=job.seed, keep_gb=keep_gb, window_share=share, save_every=1e9
    )


def begin(job: Job, minings: Sequence[Mining]) -> dict[str, Any]:
    """Makes the draft that every way begins with, and mines with it; returns the summaries by domain."""
    if (job.directory / SUMMARY).exists():
        return read_object(job.directory / SUMMARY)
    path, model = target(job.device)
    draft = job.directory / "start"
    if not job.setting.begin:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        draft.symlink_to(path / "drafter")
    else:
        raw = config_for(model.config, aux_ids=AUX, intermediate_size=WIDTH)
        corpora = [Corpus(part) for part in job.answers("begin")]
        run = options(job, job.setting.begin, RATE, keep_gb=8.0)  # two epochs
        export(draft, raw, train(model, Eagle3Config.from_dict(raw), corpora, job.directory / "run", run).checkpoint())
    trainee = reopen(draft, model)
    capture = Capture(model, trainee.config.aux_layers(model.config.num_hidden_layers), tokens=CAPTURED)
    pools = [Corpus(part) for part in job.answers("mine")]
    names, rows = pools[0].families, [row for pool in pools for row in pool.rows()]
    found = [Scored(r, lost, r.family) for r, lost in zip(rows, score(trainee, capture, rows, LENGTH)) if lost]
    summaries: dict[str, Any] = {}
    for m in minings:
        tokens = round(m.share * job.setting.steps * job.chains)
        rule = Rule(tokens, focus=m.focus, balance=m.balance, guard=m.guard, seed=job.seed)
        windows, domains = mine(found, names, rule)
        chosen = {"mined": [w.row for w in windows], "domains": whole(rows, domains, tokens, job.seed)}
        for way in WAYS:
            Corpus(job.way(way, m), {"families": names, "source": way}).add(chosen[way])
        summaries[f"{m.share:g}"] = [
            {"name": d.name, "chains": d.chains, "lost_per_chain": round(d.rate, 4), "share": round(d.share, 4),
             "windows": d.windows, "kept": d.kept, "taught": d.taught, "weight": round(d.weight, 3)}
            for d in domains
        ]  # fmt: skip
    write_object(job.directory / SUMMARY, summaries)
    return summaries


def whole(rows: Sequence[Row], domains: Sequence[Domain], tokens: int, seed: int) -> list[Row]:
    """Random answers with the domains' shares of `tokens`; if a domain has too few, they get higher weights."""
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


def go_on(job: Job, windows: Path | None, share: float = 0.5) -> Measured:
    """Continues the training, with windows or without, and measures the draft."""
    _, model = target(job.device)
    start = job.directory / "start"
    name = BASE if windows is None else windows.name
    draft = job.directory / f"{name}-draft"
    if not draft.exists():
        trainee = train(
            model,
            Eagle3Config.from_directory(start),
            [Corpus(part) for part in job.answers("more")],
            job.directory / f"{name}-run",
            options(job, job.setting.steps, job.rate, share),
            windows=[] if windows is None else [Corpus(windows)],
            start=read_tensors(start),
        )
        export(draft, read_object(start / "config.json"), trainee.checkpoint())
    return measure(job, draft)


def measure(job: Job, draft: Path) -> Measured:
    """The draft's result on the held-out texts; kept in a file beside it, also for readers of an unfinished run."""
    file = draft.with_name(f"{draft.name}.json")
    if not file.exists():
        _, model = target(job.device)
        norm = model.weights.norm
        drafter = load_drafter(draft, model.config, model.weights, dtype=norm.dtype, device=norm.device)
        capture = Capture(model, drafter.aux_layers, tokens=CAPTURED)
        tallies = walk(drafter, capture, Corpus(job.out / HELD_OUT).rows(), LENGTH, at_once=256)
        write_object(file, {"measured": [[t.tokens, t.cycles] for t in tallies]})
    return [(tokens, cycles) for tokens, cycles in read_object(file)["measured"]]


def apart(out: Path, parts: Iterable[Part]) -> int:
    """The number of held-out prompts, after a check that none is among the prompts that are learnt from."""

    def prompts(corpus: Path) -> set[tuple[int, ...]]:
        return {row.ids[: row.given] for row in Corpus(corpus).rows()}

    held = prompts(out / HELD_OUT)
    for part in parts:
        assert not held & prompts(part.directory), f"held-out prompts are in {part.directory}"
    return len(held)


def families(out: Path) -> tuple[tuple[str, ...], list[int]]:
    """Names, and the number of each held-out text's family."""
    return report.evaluated(), [row.family for row in Corpus(out / HELD_OUT).rows()]


def totals(parts: Iterable[Part]) -> Mapping[str, list[int]]:
    """By setting and purpose, how many answers and tokens of answers were there."""
    found: dict[str, list[int]] = {}
    for part in parts:
        counts = found.setdefault(part.directory.name.rpartition("-")[0], [0, 0])
        for shard in Corpus(part.directory).shards:
            counts[0] += shard.rows
            counts[1] += shard.answers
    return found
