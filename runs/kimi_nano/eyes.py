"""Trains kimi-nano's eyes: python -m runs.kimi_nano.eyes --model perilune/bundled/kimi-nano --minutes 6

First the tower learns to read, without the text model: what is in each patch, and the picture's caption, of which each
token of the picture should give the embedding of one token. Then it learns through the text model, by the cross entropy
of the answers; the losses of reading get a smaller and smaller weight.

With --tower, training begins with an exported tower; the first part is then short, and --guide small.

Without --words the text model is frozen, and the finished tower is added to the checkpoint of --model. With --words RUN
the text model learns too, at a low rate, from pictures and from the text that it was trained on (RUN is the directory
of that training); --model is then exported anew, with the tower. The loss of text has the weight --word-tokens /
--tokens. Exported weights of the text model are K before + (1 - K) after, K = --words-kept. Right answers to
in-distribution text problems with K = 0, 0.15, 0.5 and 1: 96.9, 97.7, 97.9 and 97.7 %; to problems with pictures with
K = 0, 0.15, 0.3 and 0.5: 91.2, 90.8, 83.8 and 47.1 %.

Progress is elapsed time over --minutes, compiling included. The checkpoints of --out are written whole, then renamed;
--resume goes on from them, elapsed time kept. Each line of `eyes.jsonl`, printed too, is a JSON record.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from perilune.model.moonvit_config import MERGE_SIDE
from perilune.tasks.documents import docstrings
from perilune.tasks.families import check, problems
from perilune.tasks.pictures.canvas import add_fonts
from perilune.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE
from runs.kimi_nano import data, export, state
from runs.kimi_nano.attention import WAYS, Packed
from runs.kimi_nano.data import LONGEST, Codec, loader
from runs.kimi_nano.decode import greedy
from runs.kimi_nano.evaluate import cells_of, parse_answer
from runs.kimi_nano.evaluate import score as score_words
from runs.kimi_nano.feeder import Feeder
from runs.kimi_nano.graphs import Graphs
from runs.kimi_nano.model import EAGER, Blocks, KimiNano, Seen, compiled
from runs.kimi_nano.optim import Optimizer
from runs.kimi_nano.pictures import MARKS, WEIGHTS, Pictures, placed
from runs.kimi_nano.tower import Eyes, configuration
from runs.kimi_nano.train import BALANCE, SEED, Log, Options, choose_attention

CHECKPOINT = "eyes.safetensors"
GUIDED = 0.7  # share of the schedule through the text model after which reading counts for LEAST_GUIDE
LEAST_GUIDE = 0.1
WARMUP_STEPS, FALL = 100, 0.5
FILLER = 0.1  # weight of the rows after a caption
SHARPNESS = 4.0  # factor of a row's logits over the vocabulary (dot products with embeddings)
MARK_WEIGHT = 0.5
EVALUATED = tuple(name for name in WEIGHTS if name != "picture_text")
SAMPLES_TOGETHER = 128  # counts of samples are rounded up to multiples, so that few shapes of tensors occur
WORDS_WORKERS, WORDS_PER_WORKER = 3, 8192  # data processes for text: at least, and tokens of a step for each
KEPT = 0.15  # share of the text model's weights before this training in the exported ones


@dataclass
class EyesProgress:
    step: int = 0
    seconds: float = 0.0
    pictures: int = 0
    through: int = 0  # steps through the text model


@dataclass
class Rates:
    """What changes from step to step, as float32 tensors [] on the device; `through`: the text model takes part."""

    through: bool
    tensors: dict[str, Tensor]

    @classmethod
    def on(cls, device: str) -> "Rates":
        kinds = ("guide", "rate", "number", "words_rate", "words_number")
        return cls(False, {kind: torch.zeros((), device=device) for kind in kinds})

    def set(self, through: bool, **values: float) -> None:
        self.through = through
        for kind, value in values.items():
            self.tensors[kind].fill_(value)


@dataclass
class Run:
    """What a training needs besides data."""

    text: KimiNano
    eyes: Eyes
    optimizer: Optimizer  # of the tower
    words: Optimizer | None  # of the text model, if it learns
    graphs: Graphs
    blocks: Blocks
    way: str
    device: str
    embeddings: Tensor  # [vocabulary, D] of the text model at the beginning
    words_weight: float  # of the loss of text beside that of pictures' answers

    def losses(self, block: dict[str, Tensor], through: bool) -> dict[str, Tensor]:
        """Mean losses of a block on the device; `through`: with the text model's, "answers"."""
        rows, columns = block["grid"].tolist()
        made, read = self.eyes(block["pixels"], (rows, columns))
        marks = block["marks"].long().view(-1, 2)
        weight = torch.where(marks.flatten() > 0, 1.0, 0.1)
        lost = F.cross_entropy(read.float().flatten(0, 1), marks.flatten(), reduction="none")
        slots = block["slots"].long()
        found = {"marks": (lost * weight).sum() / weight.sum(), "slots": self._caption(made.float(), slots)}
        if through:
            seen = block["places"], made.to(self.text.embed_tokens.weight.dtype)
            found["answers"] = self.answers(block["stream"], block["starts"], int(block["longest"]), seen)
        return found

    def answers(self, stream: Tensor, starts: Tensor, longest: int, seen: Seen | None) -> Tensor:
        """Mean cross entropy of the targets of a block."""
        tokens, targets = stream.long()
        packed = Packed(starts, longest, tokens.shape[0])
        attend = WAYS[self.way](packed, self.text.s.softmax_scale)
        total = self.text.loss(tokens, packed.positions(), targets, attend, self.blocks, seen)
        mean: Tensor = total / (targets >= 0).sum()
        return mean

    def step(self, block: dict[str, Tensor], words: dict[str, Tensor] | None, rates: Rates) -> dict[str, Tensor]:
        """Moves the tower by a block of pictures, and the text model by it and by `words`, a block of text; the losses,
        which the next step overwrites. Without rates.through the text model takes no part."""
        through, grid = rates.through, block["grid"]
        longest = {name: int(one["longest"]) for name, one in (("pictures", block), ("words", words)) if one}
        inputs = {key: value for key, value in block.items() if key not in ("grid", "longest")} | rates.tensors
        if words is not None:
            inputs |= {f"words_{key}": words[key] for key in ("stream", "starts")}

        def step(there: dict[str, Tensor]) -> dict[str, Tensor]:
            losses = self.losses(there | {"grid": grid, "longest": block["longest"]}, through)
            total = there["guide"] * (losses["slots"] + MARK_WEIGHT * losses["marks"])
            if through:
                total = total + losses["answers"]
            if words is not None:
                losses["words"] = self.answers(there["words_stream"], there["words_starts"], longest["words"], None)
                total = total + self.words_weight * losses["words"]
            total.backward()
            self.optimizer.step(there["rate"], there["number"])
            self.optimizer.publish()
            if through and self.words is not None:
                self.words.step(there["words_rate"], there["words_number"])
                self.words.publish()
                for router in self.text.routers():
                    router.balance(there["words_rate"] * (BALANCE / Options.rate))  # as at train.py's peak rate
            return {name: loss.detach() for name, loss in losses.items()}

        return self.graphs((tuple(grid.tolist()), through, *longest.values()), step, inputs)

    def publish(self) -> None:
        self.optimizer.publish()
        if self.words is not None:
            self.words.publish()

    def _caption(self, made: Tensor, slots: Tensor) -> Tensor:
        """The loss of reading the caption: relative squared distance of the rows to its tokens' embeddings, plus cross
        entropy of its tokens by dot products with all embeddings."""
        ends = slots == slots[:, -1:]
        filler = ends & ends.roll(1, 1)  # the first line end belongs to the caption
        weight = torch.where(filler, FILLER, 1.0).flatten()
        wanted = self.embeddings[slots.flatten()].float()
        apart = (made - wanted).square().sum(-1) / wanted.square().sum(-1).mean()
        alike = (SHARPNESS * made).to(self.embeddings.dtype) @ self.embeddings.T
        unlike = F.cross_entropy(alike.float(), slots.flatten(), reduction="none")
        return ((apart + unlike) * weight).sum() / weight.sum()


def rate_at(done: float, step: int) -> float:
    return min((step + 1) / WARMUP_STEPS, 1.0, max((1.0 - done) / FALL, 0.0))


def guide_at(through: float) -> float:
    """Weight of the losses of reading; `through`: progress (0 to 1) of the part through the text model."""
    return max(LEAST_GUIDE, 1.0 - (1.0 - LEAST_GUIDE) * max(0.0, through) / GUIDED)


def open_run(args: argparse.Namespace) -> Run:
    device = args.device
    torch.manual_seed(args.seed)
    text = export.read_back(args.model)
    text.to(device)
    words = Optimizer(text, muon=True, decay=args.words_decay) if args.words else None
    text.cast(torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_(words is not None)
    eyes = Eyes(configuration(text.s.hidden_size), len(MARKS)).to(device)
    if args.tower is not None:
        begin_with(eyes, args.tower)
    optimizer = Optimizer(eyes, muon=True, decay=args.decay)
    if device == "cuda":
        eyes.bfloat16()
    way, _ = choose_attention("auto", device, text.s)
    # Steps are CUDA graphs, in which grouped products have not been tried.
    blocks = compiled(grouped=False) if args.compile else EAGER
    embeddings = text.embed_tokens.weight.detach().clone()
    graphs = Graphs(args.compile and way == "flash")
    weight = args.word_tokens / args.tokens  # of a step, so that a token of text counts as one of pictures does
    return Run(text, eyes, optimizer, words, graphs, blocks, way, device, embeddings, weight)


@torch.no_grad()
def begin_with(eyes: Eyes, file: Path) -> None:
    """Copies an exported tower; the part that guides training is not exported and stays random."""
    there = load_file(file)
    for name, parameter in eyes.stored():
        if name not in there or there[name].shape != parameter.shape:
            sys.exit(f"--tower {file} is no tower of this size: {name} is missing or of another shape")
        parameter.copy_(there[name])


def prepared(block: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """The block's tensors on the device; `grid` and the new `longest`, tokens of its longest sample, stay on the CPU.

    For the flash kernel `starts` is filled up with empty samples and `longest` is LONGEST, so that few shapes occur.
    """
    starts = block["starts"]
    if device == "cuda":
        longest = LONGEST
        starts = F.pad(starts, (0, -len(starts) % SAMPLES_TOGETHER), value=int(starts[-1]))
    else:
        longest = min(int(starts.diff().max()), LONGEST)
    there = {
        key: value if key == "grid" else value.to(device, non_blocking=True)
        for key, value in (block | {"starts": starts}).items()
    }
    return there | {"longest": torch.tensor(longest)}


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "eyes.jsonl")
    fonts = add_fonts(args.fonts) if args.fonts is not None else 0  # before data processes are forked
    progress = EyesProgress()
    if args.resume:
        with safe_open(args.out / CHECKPOINT, "pt") as file:
            progress = EyesProgress(**json.loads(file.metadata()["progress"]))
    # Data processes are forked as soon as a loader is iterated, so before CUDA is used.
    passages = data.kept_passages(args.words) if args.words else docstrings(data.library_files())
    pictures = iter(loader(Pictures(args.model, args.seed, args.tokens, progress.step, passages), args.workers))
    words = None
    if args.words:
        for name in (VOCABULARY_FILE, CONFIG_FILE):
            shutil.copyfile(args.model / name, args.out / name)
        texts = data.Blocks(args.words, args.seed + 1, args.word_tokens, progress.through)
        several = max(WORDS_WORKERS, args.word_tokens // WORDS_PER_WORKER)
        words = iter(loader(texts, min(args.workers, several)))
    run = open_run(args)
    before = masters(run.words) if run.words else {}
    if args.resume:
        restore(args.out, run)
    run.publish()
    log(
        "start", parameters=sum(p.numel() for _, p in run.eyes.stored()), step=progress.step, attention=run.way,
        device=torch.cuda.get_device_name() if args.device == "cuda" else args.device, torch=torch.__version__,
        seed=args.seed, fonts=fonts, tokens=args.tokens, minutes=args.minutes, reading=args.reading, rate=args.rate,
        words_rate=args.words_rate if run.words else 0.0, word_tokens=args.word_tokens,
        words_kept=args.words_kept if run.words else 0.0, tower=args.tower is not None,
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
    feeder = Feeder(pictures, lambda block: prepared(block, args.device), args.seed, again=args.workers > 0)
    try:
        finished = steps(args, run, feeder, words, progress, log, began)
    finally:
        feeder.close()
    save(args.out, run, progress, args)
    log(
        "stop",
        finished=finished,
        **asdict(progress),
        fresh=feeder.fresh,
        again=feeder.repeated,
        wall=round(time.monotonic() - began, 1),
    )
    if not finished:
        return
    if run.words:
        average(run.words, before, args.words_kept)
        run.publish()
        save(args.out, run, progress, args)
        export.export(args.out, args.model)
        export.add_facts(args.words / state.LOG_FILE, args.model)
    export.add_eyes(args.model, {name: p.detach().bfloat16().cpu() for name, p in run.eyes.stored()})
    # With thinking only. perilune evaluate cannot measure this, because it has no font files (eyes_card.py).
    codec = Codec(args.model)
    for split in ("heldout", "structural") if args.score_count else ():
        exact = score(run, codec, split, args.score_count, thinking=True)
        log("score", split=split, mode="thinking", count=args.score_count, exact=exact)
    if run.words and args.score_count:
        exact = score_words(run.text, codec, cells_of(args.words, args.score_count))
        log("words", count=args.score_count, exact=exact, mean=round(sum(exact.values()) / len(exact), 4))


def steps(
    args: argparse.Namespace, run: Run, feeder: Feeder, words: Iterator[dict[str, Tensor]] | None,
    progress: EyesProgress, log: Log, began: float,
) -> bool:  # fmt: skip
    """Trains up to the end of the schedule, or --pause-after; whether it is the end."""
    clock = time.monotonic() - progress.seconds
    spoken, saved, waited, pictures = time.monotonic(), time.monotonic(), 0.0, progress.pictures
    sums, taken = dict[str, Tensor](), dict[str, int]()
    rates = Rates.on(args.device)
    while True:
        progress.seconds = time.monotonic() - clock
        done = progress.seconds / (60 * args.minutes)
        if done >= 1.0:
            return True
        if args.pause_after and time.monotonic() - began > args.pause_after and feeder.fresh:  # after a step or more
            return False
        asked = time.monotonic()
        block = next(feeder)
        waited += time.monotonic() - asked
        through = args.reading <= done
        text = prepared(next(words), args.device) if through and words is not None else None
        progress.step += 1
        progress.through += through
        progress.pictures += len(block["pixels"])
        share = rate_at(done, progress.step - 1)
        rates.set(
            through,
            guide=min(args.guide, guide_at((done - args.reading) / (1.0 - args.reading) if through else 0.0)),
            rate=args.rate * share, number=progress.step,
            words_rate=args.words_rate * rate_at(done, progress.through - 1), words_number=max(1, progress.through),
        )  # fmt: skip
        losses = run.step(block, text, rates)
        for name, loss in losses.items():
            sums[name] = sums[name] + loss if name in sums else loss.clone()
            taken[name] = taken.get(name, 0) + 1
        if progress.step % args.every == 0:
            shown = {name: round(float(value) / taken[name], 4) for name, value in sums.items()}
            now = time.monotonic()
            log(
                "step", step=progress.step, done=round(done, 4), **shown, rate=round(args.rate * share, 6),
                pictures_per_second=round((progress.pictures - pictures) / (now - spoken)),
                waiting=round(waited / (now - spoken), 3), fresh=feeder.fresh,
            )  # fmt: skip
            spoken, waited, pictures, sums, taken = now, 0.0, progress.pictures, {}, {}
        if time.monotonic() - saved > args.save_every:
            save(args.out, run, progress, args)
            saved = time.monotonic()


def save(out: Path, run: Run, progress: EyesProgress, args: argparse.Namespace) -> None:
    if run.words:
        learnt = state.Progress(progress.through, progress.seconds, progress.through * args.word_tokens)
        state.save(out / state.CHECKPOINT, run.text, run.words, learnt)
    path = out / CHECKPOINT
    partial = path.with_name(f".{path.name}")
    tensors = {name: t.detach().cpu().contiguous() for name, t in run.optimizer.state.items()}
    save_file(tensors, partial, {"progress": json.dumps(asdict(progress))})
    os.replace(partial, path)


@torch.no_grad()
def average(words: Optimizer, before: dict[str, Tensor], kept: float) -> None:
    """Sets the text model's master weights to (1 - kept) * trained + kept * before."""
    for name, tensor in before.items():
        words.state[name].lerp_(tensor.to(words.state[name].device), kept)


def masters(words: Optimizer) -> dict[str, Tensor]:
    """A copy of the master weights on the CPU."""
    return {name: tensor.cpu().clone() for name, tensor in words.state.items() if name.startswith("master.")}


def restore(out: Path, run: Run) -> None:
    if run.words:
        state.restore(out / state.CHECKPOINT, run.text, run.words)
    for name, tensor in load_file(out / CHECKPOINT).items():
        run.optimizer.state[name].copy_(tensor)


@torch.no_grad()
def score(run: Run, codec: Codec, split: str, count: int, thinking: bool, rows: int = 256) -> dict[str, float]:
    """Share of right answers of each kind of picture, greedy."""
    found: dict[str, float] = {}
    pad = codec.tokenizer.special("<|media_pad|>")
    for name in EVALUATED:
        asked = placed(problems(name, split, count, thinking=thinking))
        right = 0
        for at in range(0, count, rows):
            batch = asked[at : at + rows]
            prompts = [codec.prompt(one) for one, _, _ in batch]
            ids = torch.tensor([i for prompt in prompts for i in prompt], device=run.device)
            seen: Seen = (ids == pad).nonzero()[:, 0], _rows(run, [(patches, grid) for _, patches, grid in batch])
            limit = max(len(codec.target(one)) for one, _, _ in batch) + 16
            answers = greedy(run.text, prompts, codec.end, limit, seen)
            right += sum(check(one, parse_answer(codec, a, thinking)) for (one, _, _), a in zip(batch, answers))
        found[name] = round(right / count, 4)
    return found


def _rows(run: Run, pictures: Sequence[tuple[Any, tuple[int, int]]]) -> Tensor:
    """[tokens of all, D] in their order; pictures of one grid are encoded together."""
    together: dict[tuple[int, int], list[int]] = {}
    for i, (_, grid) in enumerate(pictures):
        together.setdefault(grid, []).append(i)
    made: dict[int, Tensor] = {}
    for (height, width), places in together.items():
        pixels = torch.stack([torch.from_numpy(pictures[i][0]) for i in places]).to(run.device)
        rows = run.eyes(pixels, (height, width))[0].unflatten(0, (len(places), height * width // MERGE_SIDE**2))
        made |= dict(zip(places, rows))
    return torch.cat([made[i] for i in range(len(pictures))]).to(run.text.embed_tokens.weight.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train kimi-nano's eyes.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="exported checkpoint, to which the tower is added")
    add("--out", type=Path, default=Path("runs/out/kimi_nano"), help="directory of the run")
    add("--tower", type=Path, metavar="FILE", help="model-vision.safetensors of a checkpoint whose tower to begin with")
    add("--fonts", type=Path, help="directory with TrueType fonts to write in, besides Pillow's own")
    add("--seed", type=int, default=SEED, help="seed of data and weights")
    add("--minutes", type=float, default=6.0, help="length of the schedule")
    add("--words", type=Path, metavar="RUN", help="directory of the text model's training: the text model learns too")
    add("--words-rate", type=float, default=5e-4, help="peak learning rate of the text model, with --words")
    add("--words-decay", type=float, default=0.1, help="weight decay of the text model, with --words")
    add("--words-kept", type=float, default=KEPT, help="share of the text model's weights before, with --words")
    add("--word-tokens", type=int, default=16384, help="tokens of text in a step, with --words")
    add("--reading", type=float, default=0.3, help="share of the schedule before the text model takes part")
    add("--guide", type=float, default=1.0, help="weight of reading beside the answers, at most")
    add("--pause-after", type=float, default=0.0, help="save and leave so many seconds after the start (0: never)")
    add("--resume", action="store_true", help="go on from the checkpoint of --out")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    add("--tokens", type=int, default=16384, help="tokens of pictures in a step")
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--decay", type=float, default=0.05, help="weight decay")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile the text model's blocks")
    add("--workers", type=int, default=13, help="data processes")
    add("--every", type=int, default=100, help="steps between lines of the log")
    add("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    add("--score-count", type=int, default=256, help="problems per kind and split of the scores (0: none)")
    args = parser.parse_args()
    if args.tokens < LONGEST or args.minutes <= 0 or not 0 <= args.words_kept < 1:
        parser.error(f"--tokens must be at least {LONGEST}, --minutes positive, and --words-kept from 0 to less than 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json: export the text model there first")
    if args.fonts is not None and not args.fonts.is_dir():
        parser.error(f"--fonts {args.fonts} is no directory")
    if args.tower is not None and not args.tower.is_file():
        parser.error(f"--tower {args.tower} is no file")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here: give --device cpu")
    if args.resume and not (args.out / CHECKPOINT).is_file():
        sys.exit(f"--resume needs {args.out / CHECKPOINT}, which is not there: leave --resume out to begin anew")
    if args.words is not None and not (args.words / data.CORPUS_FILE).is_file():
        parser.error(f"--words {args.words} has no {data.CORPUS_FILE}: give the directory of the text model's training")
    train(args)


if __name__ == "__main__":
    main()
