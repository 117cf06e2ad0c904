"""Trains kimi-nano on CPU: python -m runs.nano.train --out runs/out/kimi-nano

Makes the vocabulary when the directory has none, then trains on freshly generated problems with loss on the assistant's
turn only. `checkpoint.pt` is written every --save-every steps (whole, then renamed) and read again with --resume; data
depend on (seed, chunk) alone, so a resumed run sees what an uninterrupted one would. The last line printed is a JSON
record, kept as `train.json`.
"""

import argparse
import itertools
import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn import functional as F

from perilune.text.tools import declaration, parse_tools
from runs.nano import tokenizer
from runs.nano.model import KimiNano, Shape
from runs.nano.samples import Codec
from runs.nano.tasks import SEED, draw, examine

CHUNK = 4096  # problems generated together and sorted by length
LATE_CHUNK = 28  # from this chunk on, problems follow the later mix
BATCH_TOKENS = 2048  # padded, at most
WARMUP = 100
RATES = (  # (step of a 5,000-step run, learning rate)
    (0, 3e-3),
    (1300, 3e-3),
    (2500, 1.154e-3),
    (3400, 0.659e-3),
    (4200, 0.659e-3),
    (5000, 0.0),
)


def make_vocabulary(out: Path, seed: int, *, problems: int = 8000, merges: int = tokenizer.MERGES) -> None:
    rng = random.Random(f"{seed}:vocabulary")
    texts = []
    for _ in range(problems):
        p = draw(rng)
        texts += [str(m.get("content")) for m in p.messages] + [p.reply.reasoning, p.reply.content]
        texts += [json.dumps(args) for _, args in p.reply.tool_calls]
        texts += [m["role"] for m in p.messages] + ["assistant"]
        texts += ["tool_declare", declaration(parse_tools(list(p.tools)))] * bool(p.tools)
        for m in p.messages:
            texts += [c["id"] for c in m.get("tool_calls", ())]
            if m["role"] == "tool":
                texts.append(f"## Return of {m['tool_call_id']}\n")
    tokenizer.write(tokenizer.learn(texts, merges), out)


def batches(codec: Codec, seed: int, chunk: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids [B, T], mask [B, T] true where the token is a target) of one chunk of problems, in random order."""
    rng = random.Random(f"{seed}:{chunk}")
    rows = [(codec.prompt(p), codec.target(p)) for p in (draw(rng, late=chunk >= LATE_CHUNK) for _ in range(CHUNK))]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    groups: list[list[tuple[list[int], list[int]]]] = [[]]
    for row in rows:
        if (len(groups[-1]) + 1) * (len(row[0]) + len(row[1])) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    made = []
    for group in groups:
        longest = len(group[-1][0]) + len(group[-1][1])
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        mask = torch.zeros(len(group), longest, dtype=torch.bool)
        for i, (prompt, target) in enumerate(group):
            ids[i, : len(prompt) + len(target)] = torch.tensor(prompt + target)
            mask[i, len(prompt) : len(prompt) + len(target)] = True
        made.append((ids, mask))
    return made


def rate(step: int, steps: int) -> float:
    """Linear between the knots of RATES, stretched to `steps`; warmed up over the first steps."""
    at = step / steps * RATES[-1][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(RATES):
        if at < x1:
            return (y0 + (y1 - y0) * (at - x0) / (x1 - x0)) * min((step + 1) / WARMUP, 1.0)
    return 0.0


def quick_score(model: KimiNano, codec: Codec, thinking: bool, count: int) -> float:
    """Exact match on held-out 3-digit additions."""
    problems = examine("addition", count, unseen=True, thinking=thinking)
    model.eval()
    answers = model.greedy([codec.prompt(p) for p in problems], codec.end, 64)
    model.train()
    return sum([*a, codec.end] == codec.target(p) for a, p in zip(answers, problems)) / count


def save(path: Path, model: KimiNano, optimizer: torch.optim.Optimizer, state: dict[str, float]) -> None:
    partial = path.with_suffix(".partial")
    saved = {"shape": asdict(model.s), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved | state, partial)
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train kimi-nano on generated problems.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/out/kimi-nano"), help="directory of the run")
    parser.add_argument("--steps", type=int, default=5000, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of data and weights")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    parser.add_argument("--score-every", type=int, default=400, help="steps between held-out scores")
    parser.add_argument("--resume", action="store_true", help="go on from checkpoint.pt of --out")
    args = parser.parse_args()
    checkpoint = args.out / "checkpoint.pt"
    if min(args.steps, args.threads, args.save_every, args.score_every) < 1:
        parser.error("--steps, --threads, --save-every and --score-every must be at least 1")
    if args.resume and not checkpoint.is_file():
        parser.error(f"--resume needs {checkpoint}, which is not there: leave --resume out to begin anew")

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "tiktoken.model").is_file():
        make_vocabulary(args.out, args.seed)
    codec = Codec(args.out)
    model = KimiNano(Shape(vocab_size=codec.tokenizer.vocab_size))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-9)
    state: dict[str, float] = {"step": 0, "chunk": 0, "taken": 0, "tokens": 0, "longest": 0, "seconds": 0.0}
    if args.resume:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = {key: saved.get(key, 0) for key in state}
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {args.steps} steps from {state['step']}", flush=True)

    model.train()
    losses: list[float] = []
    clock, spoken = time.monotonic(), (time.monotonic(), state["tokens"])
    while state["step"] < args.steps:
        for ids, mask in batches(codec, args.seed, int(state["chunk"]))[int(state["taken"]) :]:
            step = int(state["step"])
            for group in optimizer.param_groups:
                group["lr"] = rate(step, args.steps)
            hidden = model.hidden(ids[:, :-1])[mask[:, 1:]]
            loss = F.cross_entropy(model.lm_head(hidden), ids[:, 1:][mask[:, 1:]])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for router in model.routers():
                router.balance(rate(step, args.steps) / 3)
            losses.append(loss.item())
            now = time.monotonic()
            state["step"], state["taken"] = step + 1, state["taken"] + 1
            state["tokens"] += ids.numel()
            state["longest"] = max(state["longest"], ids.shape[1])
            state["seconds"] += now - clock
            clock = now
            if (step + 1) % 50 == 0:
                speed = (state["tokens"] - spoken[1]) / (now - spoken[0])
                print(f"step {step + 1} loss {sum(losses) / len(losses):.4f} {speed:,.0f} tokens/s "
                      f"{state['tokens'] / 1e6:.2f} M tokens {state['seconds'] / 60:.1f} min", flush=True)  # fmt: skip
                losses, spoken = [], (now, state["tokens"])
            if (step + 1) % args.score_every == 0:
                print(f"held-out 3-digit addition, thinking: {quick_score(model, codec, True, 50):.2f}", flush=True)
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save(checkpoint, model, optimizer, state)
            if step + 1 == args.steps:
                break
        else:
            state |= {"chunk": state["chunk"] + 1, "taken": 0}
    record = {
        "parameters": parameters,
        "steps": args.steps,
        "tokens": state["tokens"] / 1e6,
        "minutes": state["seconds"] / 60,
        "longest": int(state["longest"]),
        "seed": args.seed,
        "threads": args.threads,
        "torch": torch.__version__,
        "addition_thinking": quick_score(model, codec, True, 200),
        "addition_instant": quick_score(model, codec, False, 200),
    }
    partial = args.out / ".train.json.tmp"
    partial.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(partial, args.out / "train.json")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
