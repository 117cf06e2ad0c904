"""Trains kimi-nano's eyes: python -m runs.kimi_nano.eyes --model perilune/bundled/kimi-nano --minutes 6

The text model is frozen, so whatever it does with text stays as it is. First the tower learns to read: what lies in
each patch, and the picture's caption as a row of the text model's embeddings for each of its tokens, without the text
model. Then it learns through the text model, by the cross entropy of the answers; what it learnt first counts for less
and less. The finished tower is added to the checkpoint of --model; the text model's shards are not changed.

Progress is elapsed time over --minutes. `eyes.safetensors` of --out is written whole, then renamed; --resume goes on
from it, elapsed time kept. Each line of `eyes.jsonl`, printed too, is a JSON record.
"""

import argparse
import json
import os
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
from perilune.tasks.families import check, problems
from perilune.tasks.pictures.canvas import add_fonts
from runs.kimi_nano.attention import WAYS, Packed
from runs.kimi_nano.data import LONGEST, Codec, loader
from runs.kimi_nano.decode import greedy
from runs.kimi_nano.evaluate import parse_answer
from runs.kimi_nano.export import add_eyes, read_back
from runs.kimi_nano.model import EAGER, Blocks, KimiNano, Seen, compiled
from runs.kimi_nano.optim import Optimizer
from runs.kimi_nano.pictures import MARKS, WEIGHTS, Pictures, placed
from runs.kimi_nano.tower import Eyes, configuration
from runs.kimi_nano.train import SEED, Log, choose_attention

CHECKPOINT = "eyes.safetensors"
GUIDED = 0.7  # share of the schedule through the text model after which reading counts for LEAST_GUIDE
LEAST_GUIDE = 0.1
WARMUP_STEPS, FALL = 100, 0.5
FILLER = 0.1  # weight of the rows behind a caption
SHARPNESS = 4.0  # of a row's likeness with the embeddings
MARK_WEIGHT = 0.5
EVALUATED = tuple(name for name in WEIGHTS if name != "picture_text")


@dataclass
class EyesProgress:
    step: int = 0
    seconds: float = 0.0
    pictures: int = 0


@dataclass
class Run:
    """What a training needs besides data."""

    text: KimiNano
    eyes: Eyes
    optimizer: Optimizer
    blocks: Blocks
    way: str
    device: str
    embeddings: Tensor  # [vocabulary, D] float32, of the text model

    def losses(self, block: dict[str, Tensor], through: bool) -> dict[str, Tensor]:
        """Mean losses of a block; `through`: also through the text model."""
        there = {key: value.to(self.device, non_blocking=True) for key, value in block.items() if key != "grid"}
        rows, columns = block["grid"].tolist()
        made, read = self.eyes(there["pixels"], (rows, columns))
        marks = there["marks"].long().view(-1, 2)
        weight = torch.where(marks.flatten() > 0, 1.0, 0.1)
        lost = F.cross_entropy(read.float().flatten(0, 1), marks.flatten(), reduction="none")
        slots = there["slots"].long()
        found = {"marks": (lost * weight).sum() / weight.sum(), "slots": self._caption(made.float(), slots)}
        if through:
            tokens, targets = there["stream"].long()
            packed = Packed(there["starts"], min(int(block["starts"].diff().max()), LONGEST), tokens.shape[0])
            seen = there["places"], made.to(self.text.embed_tokens.weight.dtype)
            attend = WAYS[self.way](packed, self.text.s.softmax_scale)
            total = self.text.loss(tokens, packed.positions(), targets, attend, self.blocks, seen)
            found["answers"] = total / (targets >= 0).sum()
        return found

    def _caption(self, made: Tensor, slots: Tensor) -> Tensor:
        """How far the rows are from the embeddings of the caption's tokens."""
        ends = slots == slots[:, -1:]
        filler = ends & ends.roll(1, 1)  # the first line end belongs to the caption
        weight = torch.where(filler, FILLER, 1.0).flatten()
        wanted = self.embeddings[slots.flatten()]
        apart = (made - wanted).square().sum(-1) / wanted.square().sum(-1).mean()
        unlike = F.cross_entropy(SHARPNESS * made @ self.embeddings.T, slots.flatten(), reduction="none")
        return ((apart + unlike) * weight).sum() / weight.sum()


def rate_at(done: float, step: int) -> float:
    return min((step + 1) / WARMUP_STEPS, 1.0, max((1.0 - done) / FALL, 0.0))


def guide_at(through: float) -> float:
    """How much reading counts beside the answers; `through` is the progress of the part through the text model."""
    return max(LEAST_GUIDE, 1.0 - (1.0 - LEAST_GUIDE) * max(0.0, through) / GUIDED)


def open_run(args: argparse.Namespace) -> Run:
    device = args.device
    torch.manual_seed(args.seed)
    text = read_back(args.model)
    text.to(device).cast(torch.bfloat16 if device == "cuda" else torch.float32).requires_grad_(False)
    eyes = Eyes(configuration(text.s.hidden_size), len(MARKS)).to(device)
    optimizer = Optimizer(eyes, muon=True, decay=args.decay)
    if device == "cuda":
        eyes.bfloat16()
    way, _ = choose_attention("auto", device, text.s)
    blocks = compiled() if args.compile else EAGER
    return Run(text, eyes, optimizer, blocks, way, device, text.embed_tokens.weight.detach().float())


def train(args: argparse.Namespace) -> None:
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "eyes.jsonl")
    fonts = add_fonts(args.fonts) if args.fonts is not None else 0  # before data processes are forked
    blocks = Pictures(args.model, args.seed, args.tokens)
    progress = EyesProgress()
    if args.resume:
        with safe_open(args.out / CHECKPOINT, "pt") as file:
            progress = EyesProgress(**json.loads(file.metadata()["progress"]))
        blocks.first = progress.step
    data: Iterator[dict[str, Tensor]] = iter(loader(blocks, args.workers))  # forks, so before CUDA is used
    run = open_run(args)
    if args.resume:
        for name, tensor in load_file(args.out / CHECKPOINT).items():
            run.optimizer.state[name].copy_(tensor)
    run.optimizer.publish()
    log(
        "start", parameters=sum(p.numel() for _, p in run.eyes.stored()), step=progress.step, attention=run.way,
        device=torch.cuda.get_device_name() if args.device == "cuda" else args.device, torch=torch.__version__,
        seed=args.seed, fonts=fonts, tokens=args.tokens, minutes=args.minutes, reading=args.reading, rate=args.rate,
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
    clock = time.monotonic() - progress.seconds
    spoken, saved, waited, pictures = time.monotonic(), time.monotonic(), 0.0, progress.pictures
    sums, taken = dict[str, Tensor](), dict[str, int]()
    ready = False  # once the text model's first step, which compiles, is through: that is not counted
    while True:
        progress.seconds = time.monotonic() - clock
        done = progress.seconds / (60 * args.minutes)
        if done >= 1.0 or (args.pause_after and time.monotonic() - began > args.pause_after):
            break
        asked = time.monotonic()
        block = next(data)
        waited += time.monotonic() - asked
        through = args.reading <= done
        compiling = through and not ready
        losses = run.losses(block, through)
        guide = guide_at((done - args.reading) / (1.0 - args.reading) if through else 0.0)
        total = guide * (losses["slots"] + MARK_WEIGHT * losses["marks"]) + losses.get("answers", 0.0)
        assert isinstance(total, Tensor)
        total.backward()
        if compiling:
            float(total)
            ready, clock = True, clock + time.monotonic() - asked
        share = rate_at(done, progress.step)
        progress.step += 1
        progress.pictures += len(block["pixels"])
        run.optimizer.step(args.rate * share, progress.step)
        run.optimizer.publish()
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss.detach()
            taken[name] = taken.get(name, 0) + 1
        if progress.step % args.every == 0:
            shown = {name: round(float(value) / taken[name], 4) for name, value in sums.items()}
            now = time.monotonic()
            log(
                "step", step=progress.step, done=round(done, 4), **shown, rate=round(args.rate * share, 6),
                pictures_per_second=round((progress.pictures - pictures) / (now - spoken)),
                waiting=round(waited / (now - spoken), 3),
            )  # fmt: skip
            spoken, waited, pictures, sums, taken = now, 0.0, progress.pictures, {}, {}
        if time.monotonic() - saved > args.save_every:
            save(args.out / CHECKPOINT, run, progress)
            saved = time.monotonic()
    save(args.out / CHECKPOINT, run, progress)
    del data
    log("stop", finished=done >= 1.0, **asdict(progress), wall=round(time.monotonic() - began, 1))
    if done < 1.0:
        return
    add_eyes(args.model, {name: p.detach().bfloat16().cpu() for name, p in run.eyes.stored()})
    # With thoughts alone: what is in training's fonts only, perilune evaluate cannot ask (eyes_card.py).
    for split in ("heldout", "structural"):
        exact = score(run, Codec(args.model), split, args.score_count, thinking=True)
        log("score", split=split, mode="thinking", count=args.score_count, exact=exact)


def save(path: Path, run: Run, progress: EyesProgress) -> None:
    partial = path.with_name(f".{path.name}")
    tensors = {name: t.detach().cpu().contiguous() for name, t in run.optimizer.state.items()}
    save_file(tensors, partial, {"progress": json.dumps(asdict(progress))})
    os.replace(partial, path)


@torch.no_grad()
def score(run: Run, codec: Codec, split: str, count: int, thinking: bool, rows: int = 256) -> dict[str, float]:
    """Share of right answers of each kind of picture, greedy."""
    found: dict[str, float] = {}
    pad = codec.tokenizer.special("<|media_pad|>")
    for name in EVALUATED if count else ():
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
    add("--fonts", type=Path, help="directory with TrueType fonts to write in, besides Pillow's own")
    add("--seed", type=int, default=SEED, help="seed of data and weights")
    add("--minutes", type=float, default=6.0, help="length of the schedule")
    add("--reading", type=float, default=0.3, help="share of the schedule before the text model takes part")
    add("--pause-after", type=float, default=0.0, help="save and leave so many seconds after the start (0: never)")
    add("--resume", action="store_true", help="go on from the checkpoint of --out")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    add("--tokens", type=int, default=65536, help="tokens of a step")
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--decay", type=float, default=0.05, help="weight decay")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile the text model's blocks")
    add("--workers", type=int, default=24, help="data processes")
    add("--every", type=int, default=20, help="steps between lines of the log")
    add("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    add("--score-count", type=int, default=256, help="problems per kind and split of the scores (0: none)")
    args = parser.parse_args()
    if args.tokens < LONGEST or args.minutes <= 0:
        parser.error(f"--tokens must be at least {LONGEST}, and --minutes positive")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json: export the text model there first")
    if args.fonts is not None and not args.fonts.is_dir():
        parser.error(f"--fonts {args.fonts} is no directory")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here: give --device cpu")
    if args.resume and not (args.out / CHECKPOINT).is_file():
        sys.exit(f"--resume needs {args.out / CHECKPOINT}, which is not there: leave --resume out to begin anew")
    train(args)


if __name__ == "__main__":
    main()
