"""mla_prefill.cu's CTAs that stay against its CTAs of one piece each, on the emulator: the same bits."""

from typing import Any

import pytest
import torch

from perilune.ops.attention import mla_prefill
from perilune.ops.harness import workspace
from perilune.ops.harness.case import BFLOAT16, Make
from tests.cuda_emulator.session import emulated

CPU = torch.device("cpu")
CASES = [
    mla_prefill.Case((1,), (1,), H=1),  # one piece of one tile
    mla_prefill.Case((130,), (400,), H=3),  # pieces of several tiles, one of them with 2 rows
    mla_prefill.Case((40, 0, 129), (41, 5, 130), H=2),  # several requests, one without queries
]


def attended(name: str, inputs: dict[str, Any]) -> torch.Tensor:
    return mla_prefill.op.impls[name].run(*inputs.values())


@pytest.mark.parametrize("processors", (1, 3))
@pytest.mark.parametrize("case", CASES, ids=[f"{c.counts}" for c in CASES])
def test_pieces_one_after_the_other_have_the_bits_of_pieces_alone(case: mla_prefill.Case, processors: int) -> None:
    inputs = mla_prefill.inputs(case, Make(BFLOAT16, CPU, 7))
    for seed, mode in enumerate(("early", "late", "random")):
        owner = workspace.Workspaces()
        with emulated(processors, mode, seed), owner.use():
            want = attended("cuda", inputs)
            for _ in range(2):  # the second launch begins with the count that the first one left
                assert torch.equal(attended("cuda_staying", inputs), want)
            assert workspace.current(CPU).zeros("mla_prefill.taken", 1).item() == 0


def test_what_a_piece_leaves_does_not_reach_the_next() -> None:
    """A request with infinite values and one without: the second is as if it were alone."""
    case = mla_prefill.Case((3, 129), (3, 129), H=1)
    inputs = mla_prefill.inputs(case, Make(BFLOAT16, CPU, 8))
    first = inputs["span"].tables[0, 0]
    with emulated(1, "early", 1), workspace.Workspaces().use():
        want = attended("cuda_staying", inputs)
        inputs["pages"][first] = float("inf")
        got = attended("cuda_staying", inputs)
    assert not got[:3].isfinite().any() and torch.equal(got[3:], want[3:])
