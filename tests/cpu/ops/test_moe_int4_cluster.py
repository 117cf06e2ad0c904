"""moe_int4_cluster.cu on the emulator: both CTAs of a cluster wait for what the other one sends, at every width."""

import itertools
import shutil

import pytest
import torch

from perilune.ops.harness import check
from perilune.ops.harness.case import BFLOAT16, Make
from perilune.ops.moe import moe_int4, moe_int4_cluster
from perilune.ops.moe.chosen import Chosen
from tests.cuda_emulator.session import MODES, emulated

CPU = torch.device("cpu")
SMS = 4  # two clusters: each takes several pieces of work, so that rings go around
Case = moe_int4.Case
CASES = [
    Case(128, 1, 24, 256, 256),
    Case(128, 1, 300, 512, 256),  # experts without a pair
    Case(129, 1, 3, 768, 256, S=64),  # an odd number of units of down
    Case(130, 1, 3, 512, 512, to_one=True, compact=True),  # two tiles of one expert, not the widest
    Case(140, 1, 7, 512, 512, compact=True),
]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


# All modes for each case: tests/emulate/test_sweep.py.
@pytest.mark.parametrize(("case", "mode"), list(zip(CASES, itertools.cycle(MODES))), ids=repr)
def test_results_whenever_copies_and_products_happen(case: Case, mode: str) -> None:
    with emulated(sms=SMS, mode=mode, seed=1):
        (outcome,) = check.check(moe_int4.op, case, BFLOAT16, CPU, ["cuda_cluster"])
    assert outcome.refused is None and outcome.failed is None, outcome


def test_the_bits_of_the_other_kernels_at_every_width() -> None:
    """Expert e has 8 e - 3 of the tokens: tiles of 8, 16, .. 96 columns, and of 112 in two parts. An id that is none
    adds nothing."""
    counts = [8 * e - 3 for e in range(1, 13)] + [100, 0]
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)]).int()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].unsqueeze(1)
    case = Case(len(ids), 1, len(counts), 256, 256)
    args = moe_int4.inputs(case, Make(BFLOAT16, CPU, 2))
    ids[7] = -1
    args["chosen"] = Chosen(ids, args["chosen"].weights)
    with emulated(sms=SMS, mode="random", seed=1):
        y, tall, grouped = (
            moe_int4.op.impls[n].run(*args.values()) for n in ("cuda_cluster", "cuda_tall", "cuda_prefill")
        )
    assert torch.equal(y, tall) and torch.equal(y, grouped)
    assert not y[7].any() and y.any(-1).sum() == len(ids) - 1


@pytest.mark.parametrize(
    ("tokens", "width", "compact", "reason"),
    [
        (128, 512, True, None),
        (5000, 256, False, None),
        (5001, 512, False, "128 to 5000 tokens"),
        (128, 256, True, "widths that are multiples of 512"),
        (128, 128, False, "widths that are multiples of 256"),
    ],
)
def test_what_it_takes(tokens: int, width: int, compact: bool, reason: str | None) -> None:
    case = Case(tokens, 1, 2, 512, width, compact=compact)
    args = moe_int4.inputs(case, Make(BFLOAT16, CPU, 1))
    unmet = [text for met, text in moe_int4_cluster.needs(args["x"], args["gate_up"]) if not met]
    assert unmet == ([] if reason is None else [reason])
