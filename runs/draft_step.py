"""One training step of a drafter at Kimi K2.5's shapes, on synthetic hidden states: memory and tokens per second.

python -m runs.draft_step [--rows 4 --tokens 2048 --unroll 4]. Rows are half prompt, half answer. The last line is JSON.
"""

import argparse
import json
import time
from typing import Any

import torch

from perilune.bench.shapes import shape
from perilune.draft.corpus import Row
from perilune.draft.export import config_for
from perilune.draft.train import CLIP, Optimizer, Options
from perilune.draft.trainee import Batch, Trainee
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import Eagle3Config


def measure(
    target: KimiConfig, device: torch.device, *, rows: int, tokens: int, unroll: int, steps: int
) -> dict[str, Any]:
    g = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    d, vocab = target.hidden_size, target.vocab_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=g)

    trainee = Trainee(
        Eagle3Config.from_dict(config_for(target)), normal(vocab, d), normal(vocab, d).mul_(d**-0.5), seed=0
    )
    options = Options(unroll=unroll)
    optimizer = Optimizer(trainee.parameters, options)
    ids = torch.randint(vocab, (rows, tokens), generator=g, device=device).tolist()
    batch = Batch.of([Row(tuple(row), tokens // 2, 0, True) for row in ids], device)
    aux, hidden = normal(rows * tokens, 3 * d), normal(len(batch.taught), d)
    seconds, losses = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
            lesson = trainee.lesson(batch, aux, hidden, unroll, options.decay)
        lesson.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(trainee.parameters.values()), CLIP)
        optimizer.step(1e-4)
        losses.append(lesson.loss.detach().item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    best = min(seconds)
    return {
        "parameters": sum(p.numel() for p in trainee.parameters.values()),
        "tokens": rows * tokens,
        "chains": len(batch.begin),
        "unroll": unroll,
        "step_seconds": round(best, 3),
        "tokens_per_second": round(rows * tokens / best),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if device.type == "cuda" else None,
        "losses": [round(x, 4) for x in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a drafter's training step at Kimi K2.5's shapes.")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--unroll", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps({"bench": "draft_step", **measure(shape("kimi-k2.5", 61), device, **vars(args))}))


if __name__ == "__main__":
    main()
