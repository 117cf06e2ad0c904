"""Trains kimi-nano: python -m runs.kimi_nano.train --out runs/out/kimi_nano --minutes 17

Makes the vocabulary and the plain-text corpus when the directory has none, then trains on freshly generated problems.
The learning rate warms up, stays, and falls linearly to zero over the last 40 % of the schedule. Progress is elapsed
training time over --minutes (so that it always ends in time) or, with --steps, a count of steps (so that a run can be
repeated exactly). `checkpoint.safetensors` is written whole, then renamed; --resume goes on from it, elapsed time kept.
Before the fall begins, a resumed run may be given another end.

--from MODEL begins with an exported checkpoint's weights (experts dequantised) and its vocabulary instead of random
ones; the learning rate then warms up anew and falls to zero along a cosine. Each line of
`log.jsonl`, printed too, is a JSON record.

--gpus N: a process per GPU, with --tokens and --workers each; a step is one on N times the tokens, to be given sqrt(N)
times the rate. Step k of rank r learns block N k + r.
"""

import argparse
import functools
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.tasks.families import FAMILIES
from runs.kimi_nano import tokenizer as vocabulary
from runs.kimi_nano.attention import WAYS, Packed
from runs.kimi_nano.data import (
    CORPUS_FILE,
    LONGEST,
    Blocks,
    Codec,
    Corpus,
    documentation_files,
    library_files,
    loader,
    make_vocabulary,
    prose,
    save_passages,
    texts,
)
from runs.kimi_nano.evaluate import cells_of, score
from runs.kimi_nano.export import read_back
from runs.kimi_nano.model import EAGER, KimiNano, Shape, compiled
from runs.kimi_nano.optim import Optimizer
from runs.kimi_nano.ranks import Ranks, start
from runs.kimi_nano.state import CHECKPOINT, LOG_FILE, TRAINING_FILE, Progress, progress_of, restore, save
from runs.kimi_nano.written import records

WARMUP, FALL = 150, 0.4
ALONE = Ranks()
BALANCE = 1e-3  # amount by which a router's biases change per step
SEED = 20261121


@dataclass
class Options:
    out: Path
    docs: Path | None = None
    written: Path | None = None  # records of sentences that people wrote (runs.kimi_nano.written)
    seed: int = SEED
    minutes: float = 17.0
    steps: int = 0  # > 0: the schedule's length, instead of minutes
    pause_after: float = 0.0  # > 0: save and leave this many seconds after the process began
    finish_after: float = 0.0  # > 0: the schedule ends this many seconds after the process began, instead of minutes
    resume: bool = False
    prepare_only: bool = False
    model: Path | None = None  # an exported checkpoint to begin with
    device: str = "cuda"
    gpus: int = 1
    tokens: int = 131072  # per GPU and step
    rate: float = 2e-3
    decay: float = 0.1
    muon: bool = True
    attention: str = "auto"
    compile: bool = True
    workers: int = 13  # per GPU
    save_every: float = 120.0
    score_every: float = 120.0
    score_count: int = 64
    problems: int = 40000  # for the vocabulary
    shape: Shape = field(default_factory=Shape)


class Log:
    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __call__(self, kind: str, **record: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"kind": kind, **record})
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def rate_at(progress: float, step: int, cosine: bool = False) -> float:
    """Share of the peak learning rate: `progress` 0..1 of the schedule, `step` from 0."""
    fall = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0)) if cosine else max((1.0 - progress) / FALL, 0.0)
    return min((step + 1) / WARMUP, 1.0, fall)


def prepare(options: Options, log: Log) -> None:
    """Makes vocabulary and corpus, unless the directory has them."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.model and not options.resume:
        for name in (vocabulary.VOCABULARY_FILE, vocabulary.CONFIG_FILE):
            shutil.copyfile(options.model / name, out / name)
    if options.written and not (out / records.FILE).is_file():
        shutil.copyfile(options.written, out / records.FILE)
    if (out / CORPUS_FILE).is_file():
        return
    begin = time.monotonic()
    library, documentation = library_files(), documentation_files(options.docs)
    of_people = prose(out)
    plain = [*texts([*library, *documentation]), *(text for _, text in of_people)]
    kept = save_passages(out, documentation, library)
    if not (out / vocabulary.VOCABULARY_FILE).is_file():
        make_vocabulary(
            out, options.seed, plain, problems=options.problems,
            merges=options.shape.vocab_size - vocabulary.CONTROL_SLOTS - 256,
        )  # fmt: skip
        log("vocabulary", seconds=round(time.monotonic() - begin, 1))
    corpus = Corpus.build(plain, Codec(out).tokenizer)
    corpus.save(out / CORPUS_FILE)
    file = out / records.FILE
    written = records.Written(records.read(file)).sources() if file.is_file() else {}
    log(
        "corpus", texts=len(plain), passages=kept, characters=sum(map(len, plain)), tokens=len(corpus.ids),
        held_out=len(corpus.held_out), written=written, written_share=records.SHARE,
        prose=Counter(source for source, _ in of_people),
        seconds=round(time.monotonic() - begin, 1),
    )  # fmt: skip


def choose_attention(wanted: str, device: str, s: Shape) -> tuple[str, str]:
    """(way, reason). "auto" takes the flash kernel only if it agrees with the plain form, gradients included."""
    if wanted != "auto":
        return wanted, "asked for"
    if device != "cuda":
        return "padded", f"no flash kernel for {device}"
    generator = torch.Generator(device).manual_seed(0)
    starts = torch.tensor([0, 5, 300, 301, 512], dtype=torch.int32, device=device)
    packed, results = Packed(starts, 295, 512), []
    widths = (s.qk_nope_head_dim + s.qk_rope_head_dim,) * 2 + (s.v_head_dim,)
    inputs = [
        torch.randn(512, s.num_attention_heads, w, generator=generator, device=device, dtype=torch.bfloat16)
        for w in widths
    ]
    upstream = torch.randn(
        512, s.num_attention_heads, s.v_head_dim, generator=generator, device=device, dtype=torch.bfloat16
    )
    for way in ("flash", "padded"):
        leaves = [t.clone().requires_grad_() for t in inputs]
        try:
            out = WAYS[way](packed, s.softmax_scale)(0, *leaves)
            out.backward(upstream)
        except RuntimeError as e:
            return "padded", f"{way} failed: {e}"[:300]
        results.append([out.detach(), *(t.grad for t in leaves if t.grad is not None)])
    worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*results))
    if not worst < 0.02:
        return "padded", f"flash differs from the plain form by {worst:.2g}"
    return "flash", f"within {worst:.2g} of the plain form"


def text_loss(model: KimiNano, way: str, ids: Tensor, limit: int = 65536) -> float:
    """Mean cross entropy (nats per token) over the beginning of the held-out plain text, 512 tokens at a time."""
    device, size = model.embed_tokens.weight.device, min(len(ids), limit) // 512 * 512
    starts = torch.arange(0, size + 1, 512, dtype=torch.int32, device=device)
    packed = Packed(starts, 512, size)
    tokens = ids[:size].to(device).long()
    targets = tokens.roll(-1)
    targets[511::512] = -1
    with torch.no_grad():
        total = model.loss(tokens, packed.positions(), targets, WAYS[way](packed, model.s.softmax_scale), EAGER)
    return float(total) / max(size - size // 512, 1)


def train(options: Options, began: float, ranks: Ranks = ALONE) -> Progress:
    """Runs the schedule, or the part of it until --pause-after; `began` is the process's start, time.monotonic().

    With several ranks the directory is prepared already; the first one scores, saves and logs."""
    log = Log(None if ranks.rank else options.out / LOG_FILE)
    if ranks.count == 1:
        prepare(options, log)
    torch.manual_seed(options.seed)
    device, s, codec = options.device, options.shape, Codec(options.out)
    at = {"entered": time.monotonic()}
    begun = read_back(options.model) if options.model else None
    at["weights read"] = time.monotonic()
    if begun is not None:
        s = begun.s
    if codec.tokenizer.vocab_size != s.vocab_size:
        raise SystemExit(f"{options.out} has a vocabulary of {codec.tokenizer.vocab_size} tokens, not {s.vocab_size}")
    progress = progress_of(options.out / CHECKPOINT) if options.resume else Progress()
    first_block = progress.step * ranks.count + ranks.rank
    blocks_here = Blocks(options.out, options.seed, options.tokens, first_block, ranks.count)
    data = iter(loader(blocks_here, options.workers))
    ranks.join(device)
    at["joined"] = time.monotonic()
    model = (begun or KimiNano(s)).to(device)
    optimizer = Optimizer(model, muon=options.muon, decay=options.decay)  # copies weights that are not rounded yet
    model.cast(torch.bfloat16 if device == "cuda" else torch.float32)
    if options.resume:
        restore(options.out / CHECKPOINT, model, optimizer)
    optimizer.publish()
    at["on the device"] = time.monotonic()
    way, reason = choose_attention(options.attention, device, s)
    blocks = compiled(grouped=True) if options.compile else EAGER
    if options.model and (options.model / TRAINING_FILE).is_file():
        log("before", **json.loads((options.model / TRAINING_FILE).read_text()))
    corpus = Corpus.load(options.out / CORPUS_FILE)
    apart = torch.from_numpy(corpus.held_out.astype("int32"))
    cells = functools.cache(lambda: cells_of(options.out, options.score_count))  # made by the first score: 8 seconds
    log(
        "start", parameters=sum(p.numel() for p in model.parameters()), step=progress.step, torch=torch.__version__,
        device=torch.cuda.get_device_name() if device == "cuda" else device, attention=way, reason=reason,
        gpus=ranks.count, seconds=round(time.monotonic() - began, 1),
        seconds_at={name: round(when - began, 1) for name, when in at.items()},
        options={k: v for k, v in vars(options).items() if isinstance(v, int | float | str)}, shape=asdict(s),
        mix={f.name: f.weight for f in FAMILIES.values()},
    )  # fmt: skip

    total_seconds = options.minutes * 60
    clock = 0.0  # set after the first step, which compiles
    before = progress.seconds
    saved = scored = time.monotonic()
    waited, spoken = 0.0, time.monotonic()
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    norm = torch.zeros(())
    first = True
    while True:
        done = progress.step / options.steps if options.steps else progress.seconds / total_seconds
        pause = options.pause_after and time.monotonic() - began > options.pause_after
        done, pause = ranks.agreed(done, pause)
        if done >= 1.0 or pause:
            break
        asked = time.monotonic()
        block = next(data)
        waited += time.monotonic() - asked
        loss, count = backward(model, block, device, WAYS[way], blocks, ranks)
        share = rate_at(done, progress.step, cosine=options.model is not None)
        norm = optimizer.step(options.rate * share, progress.step + 1, add=ranks.add)
        optimizer.publish()
        for router in model.routers():
            router.balance(BALANCE * share)
        losses.append(loss)
        counts.append(count)
        progress.step += 1
        progress.tokens += options.tokens * ranks.count
        if first:
            first = False
            float(loss)
            now = time.monotonic()
            log("first step", loss=float(loss / count), seconds=round(now - began, 1))
            clock, spoken, waited, saved, scored = now, now, 0.0, now, now
            if options.finish_after:
                total_seconds = before + began + options.finish_after - now
        progress.seconds = before + time.monotonic() - clock
        if progress.step % 20 == 0:
            seen = int(torch.stack(counts).sum())  # waits for the device, so that the times below include the step
            now = time.monotonic()
            progress.learnt += seen
            log(
                "step", step=progress.step, loss=round(float(torch.stack(losses).sum()) / seen, 4),
                norm=round(float(norm), 3), rate=round(options.rate * share, 6),
                tokens_per_second=round(len(losses) * options.tokens * ranks.count / (now - spoken)),
                step_seconds=round((now - spoken) / len(losses), 4), waiting=round(waited / (now - spoken), 3),
                minutes=round(progress.seconds / 60, 2), done=round(done, 4),
                memory_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else 0,
            )  # fmt: skip
            losses, counts, waited, spoken = [], [], 0.0, now
            if options.score_count and not ranks.rank and now - scored > options.score_every:
                report(model, codec, cells(), way, apart, progress, log)
                scored = spoken = time.monotonic()
        if not ranks.rank and time.monotonic() - saved > options.save_every:
            save(options.out / CHECKPOINT, model, optimizer, progress)
            saved = time.monotonic()
    if counts:
        progress.learnt += int(torch.stack(counts).sum())
    if not first:
        progress.seconds = before + time.monotonic() - clock
    if not ranks.rank:
        save(options.out / CHECKPOINT, model, optimizer, progress)
    del data
    apart_by = ranks.apart(list(optimizer.state.values()))
    log("stop", finished=done >= 1.0, **asdict(progress), apart=apart_by, wall=round(time.monotonic() - began, 1))
    if options.score_count and not ranks.rank and done >= 1.0:
        report(model, codec, cells(), way, apart, progress, log)
    return progress


def backward(
    model: KimiNano, block: dict[str, Tensor], device: str, way: Callable[..., Any], blocks: Any, ranks: Ranks = ALONE
) -> tuple[Tensor, Tensor]:
    """Gradients of a block's part of the mean loss of all ranks, to be summed; returns the loss's sum over the
    ranks and the number of targets, on the device."""
    longest = min(int(block["starts"].diff().max()), LONGEST)
    stream, starts = (block[key].to(device, non_blocking=True) for key in ("stream", "starts"))
    packed = Packed(starts, longest, stream.shape[1])
    tokens, targets = stream.long()
    count = (targets >= 0).sum()
    ranks.add([count])
    loss = model.loss(tokens, packed.positions(), targets, way(packed, model.s.softmax_scale), blocks)
    (loss / count).backward()
    loss = loss.detach()
    ranks.add([loss, *(router.load for router in model.routers())])
    return loss, count


def report(model: KimiNano, codec: Codec, cells: Any, way: str, apart: Tensor, progress: Progress, log: Log) -> None:
    begin = time.monotonic()
    exact = score(model, codec, cells)
    log(
        "score", step=progress.step, minutes=round(progress.seconds / 60, 2), exact=exact,
        mean=round(sum(exact.values()) / len(exact), 4), text_loss=round(text_loss(model, way, apart), 4),
        seconds=round(time.monotonic() - begin, 1),
    )  # fmt: skip


def parse() -> Options:
    defaults = Options(Path("runs/out/kimi_nano"))
    parser = argparse.ArgumentParser(
        description="Train kimi-nano.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=defaults.out, help="directory of the run")
    add("--docs", type=Path, help="directory with *.rst.txt files to learn as plain text")
    add("--written", type=Path, metavar="FILE", help="problems of other people to learn too (runs.kimi_nano.written)")
    add("--seed", type=int, default=defaults.seed, help="seed of data and weights")
    add("--minutes", type=float, default=defaults.minutes, help="length of the schedule")
    add("--steps", type=int, default=0, help="length of the schedule in steps, instead of --minutes")
    add("--pause-after", type=float, default=0.0, help="save and leave so many seconds after the start (0: never)")
    add("--finish-after", type=float, default=0.0, help="schedule ends so many seconds after the start (0: --minutes)")
    add("--from", type=Path, dest="model", metavar="MODEL", help="directory of an exported checkpoint to begin with")
    add("--resume", action="store_true", help="go on from the checkpoint of --out")
    add("--prepare-only", action="store_true", help="make the vocabulary and the corpus, then leave")
    add("--device", choices=("cuda", "cpu"), default=defaults.device, help="where to train")
    add("--gpus", type=int, default=1, help="GPUs of this host (processes, with --device cpu)")
    add("--tokens", type=int, default=defaults.tokens, help="tokens of a step on a GPU")
    add("--rate", type=float, default=defaults.rate, help="peak learning rate")
    add("--optimizer", choices=("muon", "adamw"), default="muon", help="for the layers' matrices")
    add("--attention", choices=("auto", *WAYS), default=defaults.attention, help="attention over packed samples")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile the blocks")
    add("--workers", type=int, default=defaults.workers, help="data processes of a GPU")
    add("--save-every", type=float, default=defaults.save_every, help="seconds between checkpoints")
    add("--score-every", type=float, default=defaults.score_every, help="seconds between held-out scores")
    add("--score-count", type=int, default=defaults.score_count, help="problems per family of such a score (0: none)")
    args = parser.parse_args()
    if args.tokens < LONGEST or args.minutes <= 0 or args.steps < 0 or args.workers < 0:
        parser.error(f"--tokens must be at least {LONGEST}, --minutes positive, --steps and --workers not negative")
    there = torch.cuda.device_count() if args.device == "cuda" and not args.prepare_only else args.gpus
    if not 0 < args.gpus <= there:
        parser.error(f"--gpus {args.gpus}, but {there} CUDA devices are here: give fewer, or --device cpu")
    if args.resume and not (args.out / CHECKPOINT).is_file():
        parser.error(f"--resume needs {args.out / CHECKPOINT}, which is not there: leave --resume out to begin anew")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--from {args.model} is no checkpoint: it has no config.json")
    values = vars(args)
    values["muon"] = values.pop("optimizer") == "muon"
    return Options(**values)


def main() -> None:
    began, options = time.monotonic(), parse()
    prepare(options, Log(options.out / LOG_FILE))
    if options.prepare_only:
        return
    if options.gpus > 1:
        start(options.gpus, train, options, began)
    else:
        train(options, began)


if __name__ == "__main__":
    main()
