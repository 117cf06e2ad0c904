"""Parts of a prompt's layer that no GPU has timed, against those that they would replace, by turns, as JSON lines.

    python -m runs.prefill_parts [--tokens 1000,4000,10000] [--parts attention,norm,scale,widen,fp8] [--rest fp8]

A part's line says whether both give the same bits, and the microseconds of each. With --rest, also the whole layer of a
K2.5-shaped model with such a rest, first as it is and then with all of these parts, twice by turns.
"""

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perilune.bench import ledger, microscope, prefill
from perilune.ops.attention import mla_prefill
from perilune.ops.harness import registry, timing, workspace
from perilune.ops.harness.case import BFLOAT16, K2, Make, clone, tensors
from perilune.ops.harness.registry import Op
from perilune.ops.linear import add_rmsnorm_quantize, linear_fp8, scale_columns, widen_fp8

SEED = 1
MATRICES = [(2112, K2.hidden), (12288, K2.q_rank), (K2.hidden, 8192), (2 * K2.width, K2.hidden), (K2.hidden, K2.width)]
NEW = {
    "mla_prefill": "cuda_staying",
    "add_rmsnorm_quantize": "cuda",
    "scale_columns": "cuda",
    "widen_fp8": "cuda",
}
HEADS = (K2.heads, K2.nope, K2.rope, K2.value, K2.latent, 64)
# Part: (op, today's implementation, cases of so many tokens).
PARTS: dict[str, tuple[Op[..., Any], str, Any]] = {
    "attention": (
        mla_prefill.op,
        "cuda",
        lambda t: [mla_prefill.Case((t,), (t,), *HEADS), mla_prefill.Case((t // 8,) * 8, (t // 8,) * 8, *HEADS)],
    ),
    "norm": (add_rmsnorm_quantize.op, "composed", lambda t: [add_rmsnorm_quantize.Case(t, K2.hidden, 1)]),
    "scale": (scale_columns.op, "torch", lambda t: [scale_columns.Case(t, o) for o, _ in MATRICES]),
    "widen": (widen_fp8.op, "torch", lambda t: [widen_fp8.Case(o, i) for o, i in MATRICES]),
    "fp8": (linear_fp8.op, "torch", lambda t: [linear_fp8.Case(t, i, o) for o, i in MATRICES]),
}


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", default="1000,4000,10000", help="of a prompt, separated by commas")
    p.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    p.add_argument("--rest", choices=prefill.RESTS, help="also the whole layer, with this rest")
    p.add_argument("--layers", type=int, default=9, help="of the larger slice, with --rest")
    p.add_argument("--device", default="cuda")
    o = p.parse_args(arguments)
    differing, tokens = 0, [int(n) for n in o.tokens.split(",")]
    print(json.dumps(ledger.circumstances()), flush=True)
    with torch.inference_mode(), workspace.owned():
        for part in o.parts.split(","):
            for row in compared(part, tokens[:1] if part == "widen" else tokens, torch.device(o.device)):
                differing += not row["equal"]
                print(json.dumps(row), flush=True)
    for row in whole_layers(o.rest, tokens, o.layers) if o.rest else ():
        print(json.dumps(row), flush=True)
    return 1 if differing else 0


def compared(part: str, tokens: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    op, old, cases = PARTS[part]
    names = [old, old] if part == "fp8" else [old, NEW[op.name]]
    roof = timing.Roof(1.0, 1.0)  # not reported
    for count in tokens:
        for case in cases(count):
            args, found, us = op.inputs(case, Make(BFLOAT16, device, SEED)), [], []
            for name, overrides in zip(names, ({}, NEW)):
                own = clone(args)
                with registry.using(overrides):
                    out = op.impls[name].run(*own.values())
                outputs = [out] if isinstance(out, Tensor) else list(out or ())
                found.append([bits(t) for t in [*outputs, *tensors(own).values()]])
            if part == "fp8":  # the op has one implementation: the ops that it calls are replaced
                for overrides in ({}, NEW, {}, NEW):
                    with registry.using(overrides):
                        us += [t.seconds * 1e6 for t in timing.measure(op, case, BFLOAT16, device, [old], roof)]
                us = [min(us[::2]), min(us[1::2])]
            else:
                seconds = {t.impl: t.seconds for t in timing.measure(op, case, BFLOAT16, device, names, roof)}
                us = [seconds[name] * 1e6 for name in names]
            equal = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
            yield {
                "part": part,
                "tokens": count,
                "case": str(case),
                "equal": equal,
                "old_us": round(us[0], 1),
                "new_us": round(us[1], 1),
                "new_tb_s": round(op.cost(case, BFLOAT16).bytes / us[1] / 1e6, 2),
                "new_tflop_s": round(op.cost(case, BFLOAT16).flops / us[1] / 1e6, 1),
            }


def bits(t: Tensor) -> Tensor:
    """The bytes of its values, so that nan equals itself."""
    return t.contiguous().view(torch.uint8)


def whole_layers(rest: str, tokens: list[int], layers: int) -> Iterator[dict[str, Any]]:
    today = microscope.Bench("kimi-k2.5", layers)
    changed = copy.copy(today)
    changed.engine = lambda layers, **config: today.engine(layers, ops=NEW, **config)  # type: ignore[method-assign]
    for count in tokens:
        for turn in range(2):
            for name, bench in (("old", today), ("new", changed)):
                row = prefill.measure(bench, count, lambda line: print(line, file=sys.stderr), rest=rest)
                yield {"layer": rest, "tokens": count, "turn": turn, "parts": name, "ms": row["ms_per_layer"]}


if __name__ == "__main__":
    sys.exit(main())
