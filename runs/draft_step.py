"""One training step of a drafter at Kimi K2.5's shapes, on synthetic hidden states: memory and tokens per second.

python -m runs.draft_step [--form mha --draft-vocab 32000 --loss hybrid --gpus 2]. Rows are half prompt, half answer;
every GPU has --rows of them. The last line is JSON.
"""

import argparse
import json
import time
from typing import Any

import torch

from perilune.bench import ledger
from perilune.bench.shapes import shape
from perilune.draft import ranks
from perilune.draft.batch import Batch
from perilune.draft.corpus import Row
from perilune.draft.export import config_for
from perilune.draft.losses import LOSSES
from perilune.draft.optimizer import Optimizer
from perilune.draft.train import CLIP, Options
from perilune.draft.trainee import Trainee
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import Eagle3Config


def measure(target: KimiConfig, args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    g = torch.Generator(device).manual_seed(ranks.rank())
    dtype = torch.bfloat16 if cuda else torch.float32
    d, vocab = target.hidden_size, target.vocab_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=g)

    cut = args.draft_vocab is not None
    trainee = Trainee(
        Eagle3Config.from_dict(config_for(target, form=args.form, draft_vocab=args.draft_vocab)),
        normal(vocab, d),
        normal(vocab, d).mul_(d**-0.5),
        seed=0,
        vocabulary=range(args.draft_vocab) if cut else None,
        own_head=cut or args.own_head,
        recompute=args.recompute,
    )
    parameters = sum(p.numel() for p in trainee.parameters())
    if ranks.count() > 1:
        ranks.shard(trainee, "lesson", device)
    options = Options(unroll=args.unroll, loss=args.loss)
    optimizer = Optimizer(dict(trainee.named_parameters()), weight_decay=options.weight_decay)
    ids = torch.randint(vocab, (args.rows, args.tokens), generator=g, device=device).tolist()
    rows = [Row(tuple(row), args.tokens // 2, 0, True) for row in ids]
    batch = Batch.of(rows, device, whole=rows * ranks.count(), shares=ranks.count())
    aux, hidden = normal(args.rows * args.tokens, 3 * d), normal(len(batch.taught), d)
    seconds, losses = [], []
    for _ in range(args.steps):
        begin = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=cuda):
            lesson = trainee.lesson(batch, aux, hidden, options.unroll, options.decay, options.loss)
        lesson.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trainee.parameters(), CLIP)
        optimizer.step(1e-4)
        losses.append(float(ranks.mean(lesson.loss.detach())))  # waits for the device
        seconds.append(time.perf_counter() - begin)
    best = min(seconds[1:])
    tokens = args.rows * args.tokens * ranks.count()
    record: dict[str, Any] = {
        "bench": "draft_step",
        **{name: value for name, value in vars(args).items() if name != "ledger"},
        "parameters": parameters,
        "batch_tokens": tokens,
        "chains": len(batch.begin) * ranks.count(),
        "step_seconds": round(best, 3),
        "tokens_per_second": round(tokens / best),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if cuda else None,
        "losses": [round(x, 4) for x in losses],
        "method": "best of the steps after the first, forward, backward and optimiser, on synthetic hidden states",
        **ledger.circumstances(),
        "gpus": ranks.count(),  # those that took part
    }
    if ranks.rank() == 0:
        if args.ledger:
            ledger.append([record], ledger.DEFAULT)
        print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a drafter's training step at Kimi K2.5's shapes.")
    parser.add_argument("--rows", type=int, default=4, help="of each GPU")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row")
    parser.add_argument("--unroll", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="2 or more: the first is not timed")
    parser.add_argument("--form", choices=("mla", "mha"), default="mla")
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--own-head", action="store_true")
    parser.add_argument("--loss", choices=tuple(LOSSES), default="kl")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--ledger", action="store_true", help="append to bench/results/draft_step.jsonl")
    args = parser.parse_args()
    target = shape("kimi-k2.5", 61)
    if args.gpus > 1:
        ranks.spawn(args.gpus, measure, target, args)
    else:
        measure(target, args)


if __name__ == "__main__":
    main()
