"""python -m tests.cuda_emulator add_rmsnorm/cuda --cases T=1 --modes early,late --seeds 2

Checks implementations of ops on the emulator: every case of the op that is not big (--big: all), against the reference.
"""

import argparse
import sys
import time

import torch

from perilune.ops.harness import check, registry
from tests.cuda_emulator.session import MODES, Fault, emulated


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_emulator", description=__doc__)
    parser.add_argument("names", nargs="+", help="op/implementation; op alone: all of its implementations for Hopper")
    parser.add_argument("--cases", help="only cases with this text in their repr")
    parser.add_argument("--big", action="store_true", help="cases that the op marks big too")
    parser.add_argument("--modes", default="early", help="of early, late, random; with commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sms", type=int, default=4)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--shuffle", action="store_true", help="lanes of a warp run in any order")
    parser.add_argument("--dtype", help="default: bfloat16 if the op has it, else float32")
    a = parser.parse_args()
    ops, failed = registry.all_ops(), 0
    device = torch.device("cpu")
    for name in a.names:
        op_name, _, wanted = name.partition("/")
        op = ops[op_name]
        dtype = getattr(torch, a.dtype) if a.dtype else op.dtypes[-1]
        names = [wanted] if wanted else [n for n in op.impls if n.startswith("cuda")]
        for case in op.cases:
            if (case.big and not a.big) or (a.cases and a.cases not in repr(case)):
                continue
            for mode in a.modes.split(","):
                for seed in range(1, a.seeds + 1):
                    assert mode in MODES, mode
                    begun = time.monotonic()
                    with emulated(a.sms, mode, seed, a.overlap, shuffle=a.shuffle):
                        try:
                            outcomes = list(check.check(op, case, dtype, device, names))
                            for o in outcomes:
                                text = (
                                    f"refused: {o.refused}"
                                    if o.refused
                                    else f"FAILED: {o.failed}"
                                    if o.failed
                                    else "ok"
                                )
                                failed += bool(o.failed)
                                print(
                                    f"{op_name}/{o.impl} {case} {mode} {seed}: {text}, {time.monotonic() - begun:.1f} s",
                                    flush=True,
                                )
                        except Fault as e:
                            failed += 1
                            print(f"{name} {case} {mode} {seed}: FAULT: {e}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
