"""The argument lists of the CUDA launches of moe, drafts and sampling: C takes them by position, unchecked.

After a wanted change: `python -m tests.cpu.ops.test_moe_launches`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.ops.drafts import accept_drafts, advance_inputs, argmax_probability, draft_embed, draft_tables
from perilune.ops.harness.case import BFLOAT16, FLOAT32, Make
from perilune.ops.moe import mla_decode_router, moe_int4, router
from perilune.ops.moe.chosen import Chosen
from perilune.ops.sampling import argmax, sample
from tests.cpu.ops.launches import Recorder, as_on_hopper, read, write

CPU = torch.device("cpu")
PINNED = Path(__file__).with_name("moe_launches.txt")


def _run(
    seen: Recorder, module: Any, case: Any, impl: str = "cuda", dtype: torch.dtype = BFLOAT16, **other: Any
) -> Any:
    args = module.inputs(case, Make(dtype, CPU, 1)) | other
    with seen.watching(args):
        return module.op.impls[impl].run(*args.values())


def _experts(T: int, **other: Any) -> moe_int4.Case:
    return moe_int4.Case(T, 2, 4, 512, 512, **other)


def _routed(seen: Recorder) -> None:
    case = _experts(1, S=128)
    x = Make(BFLOAT16, CPU, 2).randn(1, case.D)
    found = _run(seen, router, router.Case(1, case.D, 16, 2, narrow=True), x=x)
    _run(seen, moe_int4, case, x=x, chosen=found, partial=True)
    _run(seen, moe_int4, case, x=x, chosen=found, partial=True)  # the publication is taken
    _run(seen, moe_int4, case, x=x.clone(), chosen=Chosen(found.ids, found.weights), partial=True)


def _decode_router(**other: Any) -> mla_decode_router.Case:
    sizes = {"counts": (1,), "contexts": (70,), "H": 32, "block_size": 64, "D": 512, "E": 16, "k": 2}
    return mla_decode_router.Case(**(sizes | other))


def _attended(seen: Recorder) -> None:
    x, found = _run(seen, mla_decode_router, _decode_router())
    _run(seen, moe_int4, _experts(1), x=x, chosen=found, partial=True)


LAUNCHES: dict[str, Callable[[Recorder], Any]] = {
    **{f"router T={t}": lambda r, t=t: _run(r, router, router.Case(t, 512, 48, 8, narrow=True)) for t in (1, 3, 16)},
    "router T=20": lambda r: _run(r, router, router.Case(20, 512, 48, 8, narrow=True, norm=False), "cuda_many"),
    "router, moe_int4 T=1": _routed,
    "mla_decode_router": lambda r: _run(r, mla_decode_router, _decode_router()),
    "mla_decode_router fp8 long": lambda r: _run(r, mla_decode_router, _decode_router(fp8=True, contexts=(9000,))),
    "mla_decode_router, moe_int4": _attended,
    **{
        f"moe_int4 {n}": lambda r, c=c: _run(r, moe_int4, c, partial=True)
        for n, c in {
            "T=1": _experts(1), "T=1 S": _experts(1, S=128),
            "T=1 fp8 compact": _experts(1, S=64, shared_fp8=True, compact=True),
            "T=1 of eight": moe_int4.Case(1, 2, 4, 1792, 256, S=256, shared_fp8=True, compact=True),
            "T=2": _experts(2, S=128), "T=8 fp8": _experts(8, S=128, shared_fp8=True),
            "T=16 compact": _experts(16, S=128, compact=True), "T=17 S": _experts(17, S=128),
            "T=17 fp8": _experts(17, S=128, shared_fp8=True),
            "T=129 compact": _experts(129, compact=True),
            "T=8 wide S": _experts(8, S=1024),
        }.items()
    },
    **{
        f"moe_int4 prefill {n}": lambda r, c=c: _run(r, moe_int4, c, "cuda_prefill")
        for n, c in {"T=300": _experts(300), "compact": _experts(300, compact=True)}.items()
    },
    "moe_int4 tall T=129": lambda r: _run(r, moe_int4, _experts(129), "cuda_tall"),
    **{
        f"moe_int4 cluster {n}": lambda r, c=c: _run(r, moe_int4, c, "cuda_cluster")
        for n, c in {"T=129": _experts(129, S=64), "compact": _experts(300, compact=True)}.items()
    },
    "accept_drafts": lambda r: _run(r, accept_drafts, accept_drafts.Case(3, 4, 2), dtype=FLOAT32),
    "advance_inputs": lambda r: _run(r, advance_inputs, advance_inputs.Case(3, 4), dtype=FLOAT32),
    "draft_tables": lambda r: _run(r, draft_tables, draft_tables.Case(3, 5, 4, 3, 2, 8)),
    "draft_embed": lambda r: _run(r, draft_embed, draft_embed.Case(3, 16, 64, 4)),
    "argmax_probability": lambda r: _run(r, argmax_probability, argmax.Case(3, 40), dtype=FLOAT32),
    "argmax": lambda r: _run(r, argmax, argmax.Case(3, 40), dtype=FLOAT32),
    "sample": lambda r: _run(r, sample, sample.Case(8, 40, "mixed"), dtype=FLOAT32),
}  # fmt: skip


def _launches(name: str) -> list[str]:
    with torch.inference_mode(), as_on_hopper() as seen:
        LAUNCHES[name](seen)
    return seen.launches


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_get_the_arguments_they_got(name: str) -> None:
    assert _launches(name) == read(PINNED)["moe"][name]


if __name__ == "__main__":
    write(PINNED, {"moe": {name: _launches(name) for name in LAUNCHES}})
