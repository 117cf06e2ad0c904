"""Checks implementations of ops on the emulator: each case of the op that is not big, against the reference.

python -m tests.cuda_emulator add_rmsnorm/cuda --case T=1 --modes early,late --seeds 2
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from perilune.ops.harness import check, registry
from tests.cuda_emulator.session import MODES, Fault, emulated

CPU = torch.device("cpu")


def outcomes(op: Any, case: Any, names: list[str], a: argparse.Namespace, mode: str, seed: int) -> Iterator[str]:
    """A line for each implementation: "ok", "refused: reason", or "FAILED: what"."""
    dtype = getattr(torch, a.dtype) if a.dtype else op.dtypes[-1]
    for name in names:
        begun = time.monotonic()
        try:
            with emulated(a.sms, mode, seed, a.overlap, shuffle=a.shuffle):
                (outcome,) = check.check(op, case, dtype, CPU, [name])
            said = "ok"
            if outcome.refused or outcome.failed:
                said = f"refused: {outcome.refused}" if outcome.refused else f"FAILED: {outcome.failed}"
        except Fault as e:
            said = f"FAILED: {e}"
        yield f"{op.name}/{name} {case} {mode} {seed}: {said}, {time.monotonic() - begun:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.cuda_emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", help="op/implementation; op: all of its implementations for Hopper")
    parser.add_argument("--case", "--cases", dest="case", default="", help="only cases with this text in their repr")
    parser.add_argument("--big", action="store_true", help="cases that the op marks big too")
    parser.add_argument("--modes", default="early", help="of early, late, random; with commas")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sms", type=int, default=4, help="streaming multiprocessors")
    parser.add_argument("--overlap", action="store_true", help="launches begin when their predecessors allow it")
    parser.add_argument("--shuffle", action="store_true", help="lanes of a warp run in any order")
    parser.add_argument("--dtype", help="default: bfloat16 if the op has it, else float32")
    a = parser.parse_args()
    modes, ops, failed = a.modes.split(","), registry.all_ops(), 0
    if set(modes) - set(MODES):
        parser.error(f"--modes: of {', '.join(MODES)}")
    for given in a.names:
        name, _, wanted = given.partition("/")
        if name not in ops or (wanted and wanted not in ops[name].impls):
            parser.error(f"{given}: known are {', '.join(ops[name].impls if name in ops else ops)}")
        op = ops[name]
        names = [wanted] if wanted else [n for n in op.impls if n.startswith("cuda")]
        for case in (c for c in op.cases if a.case in repr(c) and (a.big or not c.big)):
            for mode in modes:
                for seed in range(1, a.seeds + 1):
                    for line in outcomes(op, case, names, a, mode, seed):
                        failed += ": FAILED: " in line
                        print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
